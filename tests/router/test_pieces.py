"""Texts that are tokenised piece by piece have the ids of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from router.text import pieces as module
from router.text.pieces import PIECE, PieceCache, cuts_between_words, pieces
from router.text.tokenizer import Tokenizer, load_tokenizer
from support.models import smollm2_files

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["the", "Don't", "naïve", "x3", "7", "1234", "\n", "  ", "\t", " ", "我们", "😀", "é"]
WORDS += ["<|im_start|>", "<|im_end|>", "a", "I'LL", "...", "(b)", "\u00a0", "e\u0301", "_z"]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_files())


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 8)
    monkeypatch.setattr("router.text.tokenizer.PIECE", 8)


@pytest.mark.usefixtures("small_pieces")
def test_random_texts_have_the_ids_of_the_whole(smollm2):
    rust = smollm2._tokenizer

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40), st.booleans())
    def check(words, is_spaced):
        text = (" " if is_spaced else "").join(words)
        text = text.encode("utf-8", "ignore").decode()
        assert smollm2.encode(text) == rust.encode(text).ids

    check()


def test_pieces_are_the_text_and_end_between_words():
    text = "An old word " * 500 + "1 2 3" * 700
    parts = list(pieces(text))
    assert "".join(parts) == text and len(parts) > 4
    for before, after in zip(parts, parts[1:], strict=False):
        assert before[-1].isalpha() and after[0] == " " and after[1].isalpha()
        assert len(before) > PIECE
    assert list(pieces("")) == [""] and list(pieces("一" * 5000)) == ["一" * 5000]


def test_what_came_before_is_not_tokenised_again(smollm2):
    asked: list[str] = []

    def encode(texts):
        asked.extend(texts)
        return [smollm2.encode(text, add_special_tokens=False) for text in texts]

    cache = PieceCache(encode)
    document = "".join(f"{i} words after words and " for i in range(300))
    first = cache.encode(document + "one question")
    new, asked[:] = sum(map(len, asked)), []
    second = cache.encode(document + "another one")
    assert new == len(document + "one question")
    assert sum(map(len, asked)) < PIECE + 100
    assert first == smollm2.encode(document + "one question", add_special_tokens=False)
    assert second == smollm2.encode(document + "another one", add_special_tokens=False)


def test_how_much_is_new_is_known_before(smollm2):
    document = "words after words and " * 300
    assert smollm2.num_new_characters(document, "who") == len(document)
    smollm2.encode(document, cache_salt="who")
    assert smollm2.num_new_characters(document, "else") == len(document)
    assert 0 < smollm2.num_new_characters(document + "more", "who") < PIECE + 100
    assert smollm2.num_new_characters("short", "who") == 5


def test_another_salt_finds_nothing():
    asked: list[str] = []
    cache = PieceCache(lambda texts: [asked.extend(texts) or [len(text)] for text in texts])
    text = "word and " * 300
    for salt in ("", "a", "b"):
        cache.encode(text, salt)
    assert sum(map(len, asked)) > 2 * len(text)
    asked.clear()
    cache.encode(text, "a")
    assert asked == [text[sum(map(len, list(pieces(text))[:-1])) :]]


def test_only_so_many_pieces_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PIECES", 3)
    cache = PieceCache(lambda texts: [[len(text)] for text in texts])
    for letter in "abcdef":
        cache.encode(f"{letter} word " * 600)
    assert len(cache._known) == 3


def byte_level(pattern: str | None) -> RustTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    rust.pre_tokenizer = plain
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        rust.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    rust.decoder = decoders.ByteLevel()
    return rust


@pytest.mark.parametrize("pattern", [None, LLAMA_3])
def test_what_stands_around_a_text_stands_around_its_pieces(pattern):
    rust = byte_level(pattern)
    rust.add_special_tokens(["<s>", "</s>"])
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    text = "two words and " * 400
    assert cuts_between_words(rust)
    ids = Tokenizer(rust).encode(text)
    assert ids == rust.encode(text).ids and (ids[0], ids[-1]) == (256, 257)
    assert Tokenizer(rust).encode(text, False) == ids[1:-1]


def test_tokenizers_that_look_over_a_space_are_left_whole():
    assert cuts_between_words(byte_level(None))
    assert not cuts_between_words(byte_level(r"\p{N}{1,3}"))  # words that go together
    assert not cuts_between_words(byte_level(r"\p{L}+ ?"))  # a space goes with what is before it
    stripped = byte_level(None)
    stripped.normalizer = normalizers.Strip()
    assert not cuts_between_words(stripped)
    for added in (AddedToken("two words"), AddedToken("end", rstrip=True)):
        rust = byte_level(None)
        rust.add_tokens([added])
        assert not cuts_between_words(rust)
    without = byte_level(None)
    without.pre_tokenizer = None
    assert not cuts_between_words(without)
