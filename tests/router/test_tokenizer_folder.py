"""Tokenizers of Hugging Face folders, against transformers."""

import codecs
import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from core.errors import ModelError
from core.model_files import ModelFiles
from router.text.tokenizer import load_tokenizer
from support.plain_tokenizers import BYTE_TOKENS, MERGES, WORDS


def byte_level_json():
    """A small tokenizer.json with a template that adds <s>."""
    vocab = {token: i for i, token in enumerate([*BYTE_TOKENS, *WORDS])}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    rust = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<s>", "</s>", "<|end|>"])
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 264)]
    )
    rust.enable_truncation(3)
    return rust


def folder(tmp_path, rust=None, **files):
    (rust or byte_level_json()).save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        suffix = ".jinja" if name == "chat_template" else ".json"
        (tmp_path / f"{name}{suffix}").write_text(text)
    return load_tokenizer(ModelFiles("m", tmp_path, "safetensors"))


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_folder_ids_equal_transformers(tmp_path, switches):
    from transformers import PreTrainedTokenizerFast

    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **switches}
    tokenizer = folder(tmp_path, tokenizer_config=config)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        **{"bos_token": "<s>", "eos_token": "</s>", **switches},
    )
    for text in ("hello world 123", "", "<s>hello</s>", "é😀"):
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=special) == expected


def test_folder_ends_and_special_tokens(tmp_path):
    tokenizer = folder(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        generation_config={"eos_token_id": [266, 265]},
        config={"eos_token_id": 1},
    )
    assert tokenizer.eos_token_ids == (265, 266)
    assert tokenizer.bos_token_id == 264
    assert tokenizer.vocab_size == 267
    assert tokenizer.chat_template is None
    assert len(tokenizer.encode("hello " * 50)) > 50  # the file's truncation is off


def test_folder_ends_from_the_model_config_and_the_special_map(tmp_path):
    tokenizer = folder(
        tmp_path, special_tokens_map={"eos_token": "</s>"}, config={"eos_token_id": 3}
    )
    assert tokenizer.eos_token_ids == (265, 3)


def test_folder_without_companions(tmp_path):
    tokenizer = folder(tmp_path)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "A{{ bos_token }}", "bos_token": "<s>"}}, "A<s>"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({"tokenizer_config": {"chat_template": "A"}, "chat_template": "J"}, "J"),
    ],
)
def test_folder_chat_template(tmp_path, files, expected):
    template = folder(tmp_path, **files).chat_template
    assert template.render([{"role": "user", "content": "x"}]) == expected


def test_folder_template_for_tools(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "D"}]}
    config["chat_template"].append({"name": "tool_use", "template": "T"})
    template = folder(tmp_path, tokenizer_config=config).chat_template
    assert template.render([{"role": "user", "content": "x"}], tools=[{}]) == "T"


def test_folder_problems_are_model_errors(tmp_path):
    files = ModelFiles("m", tmp_path, "safetensors")
    with pytest.raises(ModelError, match="no tokenizer.json"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        load_tokenizer(files)
    with pytest.raises(ModelError, match="cannot read .*tokenizer_config"):
        folder(tmp_path, tokenizer_config="{")
    with pytest.raises(ModelError, match="not valid Jinja"):
        folder(tmp_path, tokenizer_config={"chat_template": "{% if %}"})
    wordlevel = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="decoder none is not supported"):
        folder(tmp_path, rust=wordlevel, tokenizer_config={})


def test_sentencepiece_folder(tmp_path):
    """The layout of Llama 2 and Mistral: byte fallback, and one space stripped in front."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "▁": 257, "a": 258}
    rust = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = folder(tmp_path, rust=rust)
    ids = tokenizer.encode("a é😀")
    assert tokenizer.decode(ids) == "a é😀" == rust.decode(ids)
    assert tokenizer.id_to_bytes(1 + 0xC3) == b"\xc3"
    assert codecs.decode(b"".join(map(tokenizer.id_to_bytes, ids)), "utf-8") == " a é😀"
