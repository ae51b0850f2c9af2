"""Tokenizers from GGUF metadata, against second implementations in plain Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ModelError
from router.text.gguf_tokenizer import tokenizer_from_gguf
from router.text.tokenizer import Tokenizer
from support.plain_tokenizers import BYTE_TOKENS, GPT2, MERGES, UNICODE, WORDS, PlainBPE


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


# ---------------------------------------------------------------- SentencePiece


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
