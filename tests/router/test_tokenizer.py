"""SmolLM2: token ids of the original tokenizer, and bytes back.

Two oracles: ids that the original tokenizer is known to give, and a second implementation.
"""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import RequestError
from core.gguf_metadata import read_gguf_metadata
from router.text.tokenizer import load_tokenizer
from support.models import smollm2_files
from support.plain_tokenizers import GPT2, UNICODE, PlainBPE


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_files())


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
