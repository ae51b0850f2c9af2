"""Token ids of the original tokenizers, and bytes back.

Three oracles: ids that the original SmolLM2 tokenizer is known to give; a second implementation
of byte-level BPE and of SentencePiece BPE in plain Python, here; and transformers.
"""

import codecs
import json
import struct
import threading
from functools import cache

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from core.errors import ModelError, RequestError
from core.gguf_metadata import read_gguf_metadata
from core.model_files import ModelFiles
from router.text.gguf_tokenizer import tokenizer_from_gguf
from router.text.tokenizer import Tokenizer, load_tokenizer
from support.models import smollm2_files

# Letters, digits, marks, symbols, spaces of many scripts, emoji with joiners and modifiers; all
# assigned long ago, since implementations follow different versions of Unicode.
UNICODE = st.lists(
    st.one_of(
        st.sampled_from(" \n\t\r'0123456789aAzZ<|>_-.\u00a0\u3000\u200d\ufe0f"),
        st.characters(max_codepoint=0x2FF, exclude_categories=("Cs", "Cn", "Cc")),
        st.sampled_from("你好世界日本語カタカナ한국어العربيةעבריתहिन्दीไทย𝔘𝟙²½Ⅷ٣"),
        st.sampled_from("😀👨‍👩‍👧🏽🇩🇪❤️e\u0301"),
        st.sampled_from(["don't", "I'LL", "def f(x):", "<|im_end|>", "  ", "12345", "http://"]),
    ),
    max_size=60,
).map("".join)


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_files())


# ---------------------------------------------------------------- SmolLM2

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Ids published by users of the original tokenizer.json, from several programs.
SYSTEM_IDS = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
SYSTEM_IDS = [1, *SYSTEM_IDS, 411, 407, 19712, 8182, 2, 198]


@pytest.mark.parametrize(
    ("question", "ids"),
    [
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
        ("hello world", [28120, 905]),
        ("Hello", [19556]),
        (
            "Quelle est la capitale de la France ? Réponds en une phrase.",
            [65, 2726, 290, 1264, 2618, 47765, 1121, 367, 2618, 4649, 9148, 428]
            + [2756, 96, 19870, 430, 16520, 8715, 30],
        ),
    ],
)
def test_a_chat_has_the_ids_of_the_original_tokenizer(smollm2, question, ids):
    text = smollm2.chat_template.render([{"role": "user", "content": question}])
    turn = [1, 4093, 198, *ids, 2, 198, 1, 520, 9531, 198]
    assert smollm2.encode(text, add_special_tokens=False) == SYSTEM_IDS + turn


def byte_characters():
    """GPT-2's bytes_to_unicode, as in its paper's code: printable bytes first."""
    keep = [b for b in range(256) if chr(b).isprintable() and b != 0x20 and b != 0xAD]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}


class PlainBPE:
    """Byte-level BPE as Sennrich et al. 2016 and GPT-2 describe it, slow and simple."""

    def __init__(self, tokens, merges, special, pattern, split_digits):
        self.vocab = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.pattern = regex.compile(pattern)
        self.split_digits = split_digits
        self.characters = byte_characters()
        self.word = cache(self._word)

    def encode(self, text):
        ids = []
        for i, part in enumerate(self.special.split(text)):
            if i % 2:
                ids.append(self.vocab[part])
                continue
            pieces = regex.split(r"(\p{N})", part) if self.split_digits else [part]
            for piece in pieces:
                for word in self.pattern.findall(piece):
                    ids += self.word(word)
        return ids

    def _word(self, word):
        parts = [self.characters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1e9))
            if best not in self.ranks:
                break
            i = pairs.index(best)
            parts[i : i + 2] = ["".join(best)]
        return [self.vocab[part] for part in parts]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def plain():
    metadata = read_gguf_metadata(smollm2_files().path, "tokenizer.ggml.")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    return PlainBPE(tokens, metadata["tokenizer.ggml.merges"], special, GPT2, split_digits=True)


TABLE = {
    "": [],
    " ": [216],
    "1234567890": [33, 34, 35, 36, 37, 38, 39, 40, 41, 32],
    "3.14 x 10": [35, 30, 33, 36, 1792, 216, 33, 32],
    "2024-01-31": [34, 32, 34, 36, 29, 32, 33, 29, 35, 33],
}


@pytest.mark.parametrize("text", TABLE)
def test_pinned_ids(smollm2, text):
    assert smollm2.encode(text) == TABLE[text]


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x ** 2  # 4 spaces\n\n\tif x != 0x1F:\n        pass\n",
        "你好，世界！今天是2024年1月31日。",
        "😀 👨‍👩‍👧 🏽 🇩🇪 ❤️",
        "a  b   c \n\n \n d\t\te \u00a0f",
        "x² + ½ = Ⅷ ٣٤",
        "<|im_start|>user\n<|im_end|><|endoftext|>< |im_end|>",
        "I'LL don't we've 'tis",
        "e\u0301 é \u200d\ufeff",
    ],
)
def test_ids_equal_the_second_implementation(smollm2, plain, text):
    assert smollm2.encode(text) == plain.encode(text)
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@settings(max_examples=400, deadline=None)
@given(UNICODE)
def test_ids_equal_the_second_implementation_on_any_text(smollm2, plain, text):
    assert smollm2.encode(text) == plain.encode(text)
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_properties_of_smollm2(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert [smollm2.is_special(i) for i in (0, 2, 16, 17, 49151)] == [True] * 3 + [False] * 2
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_text(smollm2.encode(" the")[0]) == " the"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49160), max_size=40), st.booleans())
def test_decode_equals_the_tokenizers_package_on_any_ids(smollm2, ids, skip):
    theirs = smollm2._tokenizer.decode(ids, skip_special_tokens=skip)
    assert smollm2.decode(ids, skip_special_tokens=skip) == theirs


def test_bytes_of_tokens_join_to_the_text(smollm2):
    text = "naïve 😀👨‍👩‍👧 你好"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.id_to_bytes, ids)) == text.encode()
    assert any(smollm2.token_text(i) == "\ufffd" for i in ids)
    assert [smollm2.id_to_bytes(i) for i in (-1, 49152, 10**9)] == [b""] * 3


def test_every_byte_has_a_token(smollm2):
    single = {smollm2.id_to_bytes(i) for i in range(smollm2.vocab_size)}
    # 0xC0, 0xC1 and 0xF5 up are in no UTF-8 text; SmolLM2's vocabulary left out more.
    assert len([1 for byte in range(256) if bytes([byte]) in single]) > 200


def test_a_lone_surrogate_is_the_clients_error(smollm2):
    with pytest.raises(RequestError, match="surrogate"):
        smollm2.encode("a\ud800b")
    with pytest.raises(TypeError):
        smollm2.encode(5)


def test_a_megabyte_is_encoded_beside_other_threads(smollm2):
    """The GIL is free meanwhile: this thread counts on while another one encodes."""
    done = threading.Event()

    def encode():
        smollm2.encode("Hello 123 你好\n" * 70_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


# ---------------------------------------------------------------- other GGUF tokenizers

BYTE_TOKENS = list(byte_characters().values())
WORDS = ["he", "ll", "hell", "hello", "Ġw", "Ġhello", "12", "123"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ hello", "1 2", "12 3"]


def gpt2_metadata(pre="gpt-2", **extra):
    tokens = [*BYTE_TOKENS, *WORDS, "<bos>", "<eos>", "<tool>"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": MERGES,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "bos_token_id": tokens.index("<bos>"),
        "eos_token_id": tokens.index("<eos>"),
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": (GPT2, False),
    "smollm": (GPT2, True),
    "llama-bpe": (LLAMA3, False),
    "qwen2": (LLAMA3.replace("{1,3}", ""), False),
}


@pytest.mark.parametrize("pre", PATTERNS)
@settings(max_examples=100, deadline=None)
@given(text=UNICODE | st.text("helo 123W", max_size=20))
def test_pre_tokenizers_split_like_their_patterns(pre, text):
    import unicodedata

    metadata = gpt2_metadata(pre)
    rust = tokenizer_from_gguf(metadata, "x").tokenizer
    pattern, digits = PATTERNS[pre]
    plain = PlainBPE(
        metadata["tokenizer.ggml.tokens"], MERGES, ["<bos>", "<eos>", "<tool>"], pattern, digits
    )
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert rust.encode(text, add_special_tokens=False).ids == plain.encode(expected)


def test_bos_and_eos_around_a_text():
    hello = BYTE_TOKENS.index("h"), len(BYTE_TOKENS) + WORDS.index("hello")
    bos, eos = (gpt2_metadata("gpt-2")[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos"))

    def ids(pre, **extra):
        rust = tokenizer_from_gguf(gpt2_metadata(pre, **extra), "x").tokenizer
        assert rust.encode("hello", add_special_tokens=False).ids == [hello[1]]
        return rust.encode("hello").ids

    assert ids("gpt-2") == [hello[1]]
    assert ids("gpt-2", add_bos_token=True) == [bos, hello[1]]
    assert ids("gpt-2", add_bos_token=True, add_eos_token=True) == [bos, hello[1], eos]
    assert ids("llama-bpe") == [bos, hello[1]]
    assert ids("llama-bpe", add_bos_token=False) == [hello[1]]


def test_ends_of_generation():
    assert tokenizer_from_gguf(gpt2_metadata("gpt-2"), "x").eos_token_ids == (265,)
    found = tokenizer_from_gguf(gpt2_metadata("gpt-2", eot_token_id=264), "x")
    assert found.eos_token_ids == (265, 264)
    metadata = gpt2_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"][264] = "<|eot_id|>"
    assert tokenizer_from_gguf(metadata, "x").eos_token_ids == (265, 264)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "brand-new"}, "m.gguf: tokenizer.ggml.pre 'brand-new' is not known"),
        ({"pre": None}, "tokenizer.ggml.pre None is not known"),
        ({"pre": "default"}, "tokenizer.ggml.pre 'default' is not known"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokens": []}, "no tokenizer"),
        ({"merges": None}, "no merges"),
        ({"merges": ["not there"]}, "do not fit"),
        ({"token_type": [1]}, "1 token types"),
    ],
)
def test_what_is_not_known_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(gpt2_metadata(**change), "m.gguf")


# ---------------------------------------------------------------- SentencePiece in GGUF


def sentencepiece_metadata(**extra):
    words = [
        "▁h",
        "he",
        "ll",
        "▁he",
        "llo",
        "▁hello",
        "lo",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "▁▁",
    ]
    letters = ["▁", *"helowrdabc你好é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1e9] * len(letters),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def plain_sentencepiece(metadata, text, prefix=True):
    """SentencePiece's own rule: merge the best scored adjacent pair, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {t: i for i, t in enumerate(tokens) if i >= 259}
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in zip(parts, parts[1:], strict=False)]
        known = [(-scores[vocab[pair]], i) for i, pair in enumerate(pairs) if pair in vocab]
        if not known:
            break
        i = min(known)[1]
        parts[i : i + 2] = [pairs[i]]
    ids = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [3 + byte for byte in part.encode()]
    return ids


SP_TEXT = st.text(st.sampled_from("helowrd abc你好é😀ñ1\n"), max_size=30) | st.sampled_from(
    ["hello world", " hello", "hello  world  ", "hellollo", "héllo 😀"]
)


@settings(max_examples=300, deadline=None)
@given(SP_TEXT, st.booleans())
def test_sentencepiece_ids_and_text(text, prefix):
    metadata = sentencepiece_metadata(add_space_prefix=prefix, add_bos_token=False)
    tokenizer = Tokenizer(tokenizer_from_gguf(metadata, "x").tokenizer)
    ids = tokenizer.encode(text)
    assert ids == plain_sentencepiece(metadata, text, prefix)
    assert tokenizer.decode(ids) == text == tokenizer._tokenizer.decode(ids)
    assert b"".join(map(tokenizer.id_to_bytes, ids)).decode().removeprefix(
        " "
    ) == text.removeprefix("" if prefix else " ")


def test_sentencepiece_begins_with_bos_and_keeps_the_space_of_a_continuation():
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer(tokenizer_from_gguf(metadata, "x").tokenizer)
    ids = tokenizer.encode("hello world")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids[2:]) == "world"
    assert tokenizer.decode(ids[2:], continues=True) == " world"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")


# ---------------------------------------------------------------- GGUF files


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_file(path, *, version=3, pairs=(), magic=b"GGUF"):
    body = b"".join(gguf_string(key) + value for key, value in pairs)
    path.write_bytes(magic + struct.pack("<IQQ", version, 0, len(pairs)) + body)
    return path


ARRAY_OF_TWO = struct.pack("<IIQ", 9, 8, 2) + gguf_string("a") + gguf_string("bé")
PAIRS = [
    ("x.other", struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)),
    ("t.flag", struct.pack("<I?", 7, True)),
    ("t.name", struct.pack("<I", 8) + gguf_string("你好")),
    ("t.list", ARRAY_OF_TWO),
    ("t.big", struct.pack("<IQ", 10, 2**60)),
    ("t.nested", struct.pack("<IIQIQ2B", 9, 9, 1, 0, 2, 7, 8)),
]


def test_gguf_metadata(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", pairs=PAIRS)
    assert read_gguf_metadata(path, "t.") == {
        "t.flag": True,
        "t.name": "你好",
        "t.list": ["a", "bé"],
        "t.big": 2**60,
        "t.nested": [[7, 8]],
    }
    assert read_gguf_metadata(path)["x.other"] == [1, -2, 3]


def test_every_cut_of_a_gguf_file_is_an_error(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", pairs=PAIRS)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="m.gguf"):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    "options",
    [
        {"version": 1},
        {"version": 3 << 24},
        {"magic": b"GGML"},
        {"pairs": [("a", struct.pack("<I", 99))]},
        {"pairs": [("a", struct.pack("<IIQ", 9, 4, 2**63))]},
        {"pairs": [("a", struct.pack("<IIQ", 9, 8, 2**63))]},
        {"pairs": [("a", struct.pack("<IQ", 8, 2**64 - 1))]},
        {"pairs": [("a", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50)]},
    ],
)
def test_hostile_gguf_files_are_errors(tmp_path, options):
    with pytest.raises(ModelError, match="not a readable GGUF"):
        read_gguf_metadata(gguf_file(tmp_path / "m.gguf", **options))


def test_missing_file(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        read_gguf_metadata(tmp_path / "no.gguf")


# ---------------------------------------------------------------- Hugging Face folders


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
