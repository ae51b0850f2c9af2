"""The bytes of every token, as the router's tokenizer has them too."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from core.errors import ModelError
from core.model_files import ModelFiles
from core.vocabulary import Vocabulary, load_vocabulary
from router.text.tokenizer import load_tokenizer
from support.byte_tokenizer import EOS, byte_tokenizer
from support.models import smollm2_files


def folder_with(path: Path, rust: RustTokenizer, **config: object) -> ModelFiles:
    rust.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    return ModelFiles("x", path, "safetensors")


def expect_like_the_router(vocabulary: Vocabulary, files: ModelFiles) -> None:
    tokenizer = load_tokenizer(files)
    assert len(vocabulary.tokens) == tokenizer.vocab_size
    assert set(vocabulary.eos_token_ids) <= set(tokenizer.eos_token_ids)
    for index, token in enumerate(vocabulary.tokens):
        expected = b"" if tokenizer.is_special(index) else tokenizer.id_to_bytes(index)
        assert token == expected, index


def test_a_gguf_vocabulary():
    files = smollm2_files()
    vocabulary = load_vocabulary(files)
    expect_like_the_router(vocabulary, files)
    assert vocabulary.eos_token_ids and vocabulary.tokens[vocabulary.eos_token_ids[0]] == b""
    assert b" the" in vocabulary.tokens


def test_a_byte_level_folder(tmp_path):
    files = folder_with(tmp_path, byte_tokenizer()._tokenizer, eos_token_id=[EOS])
    vocabulary = load_vocabulary(files)
    expect_like_the_router(vocabulary, files)
    assert vocabulary.tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.eos_token_ids == (EOS,)


def test_a_byte_fallback_folder(tmp_path):
    vocab = {"<0x0A>": 0, "▁a": 1, "é": 2, "</s>": 3}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    files = folder_with(tmp_path, rust, eos_token_id=3)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    vocabulary = load_vocabulary(files)
    expect_like_the_router(vocabulary, files)
    assert vocabulary == Vocabulary([b"\n", b" a", "é".encode(), b""], (3,))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_vocabulary(ModelFiles("x", tmp_path, "safetensors"))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(ModelError, match="not a readable vocabulary"):
        load_vocabulary(ModelFiles("x", tmp_path, "safetensors"))
