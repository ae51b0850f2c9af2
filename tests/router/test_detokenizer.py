"""Streamed text equals whole text, whatever the tokens and the chunks were."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.model_files import ModelFiles
from router.text.detokenizer import IncrementalDetokenizer
from router.text.tokenizer import Tokenizer, load_tokenizer
from support.models import smollm2_files

SPECIAL = 300


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 up are words of several bytes, 300 is special."""

    WORDS = [b"ab", b"abc", b"\n\n", b" the", "é".encode(), "😀".encode()[:2], "😀".encode()[2:]]

    def id_to_bytes(self, index):
        if index == SPECIAL:
            return b"<end>"
        return bytes([index]) if index < 256 else self.WORDS[index - 256]

    def is_special(self, index):
        return index == SPECIAL

    decode = Tokenizer.decode
    strips_leading_space = False
    _special = frozenset({SPECIAL})


TOKENIZER = ByteTokenizer()
# Few letters, so that stops meet themselves and each other; bytes of one emoji and of CJK.
ALPHABET = [*b"abc\n", 0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD, 0xA0, 0xFF, *range(256, 263), SPECIAL]
TOKENS = st.lists(st.sampled_from(ALPHABET) | st.integers(0, 262), max_size=60)
STOPS = st.lists(st.text(st.sampled_from("abc\n é😀你\ufffd"), min_size=1, max_size=6), max_size=4)


def whole_text(ids, stop, include, skip=True):
    """The definition, on the whole text: cut at the match that begins first."""
    text = TOKENIZER.decode(ids, skip, continues=True)
    found = [(text.find(s), len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    start, length, string = min(found)
    return text[: start + (length if include else 0)], string


def streamed(ids, cuts, stop, **options):
    """All deltas of the tokens in the given chunks."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop, track_pieces=True, **options)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)] + [
        detokenizer.finish()
    ]
    return deltas, detokenizer


@settings(max_examples=1500, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 60), max_size=8), STOPS, st.booleans(), st.booleans())
@example([*b"xabcde"], [], ["abcdz", "bc"], False, True)
@example([*b"aabaab", 0x61], [3], ["aabaac", "ba"], False, True)
def test_streamed_text_is_the_whole_text(ids, cuts, stop, include, skip):
    """V27, V28."""
    expected, string = whole_text(ids, stop, include, skip)
    deltas, detokenizer = streamed(ids, cuts, stop, include_stop=include, skip_special_tokens=skip)
    assert "".join(deltas) == expected
    assert detokenizer.stopped == (string is not None)
    assert detokenizer.stop_string == string
    used = detokenizer.num_tokens_used
    assert len(detokenizer.pieces) == used <= len(ids)
    assert "".join(detokenizer.pieces) == expected
    if string is None:
        assert used == len(ids)


@settings(max_examples=500, deadline=None)
@given(TOKENS, STOPS)
def test_tokens_used_are_those_up_to_the_end_of_the_match(ids, stop):
    _, detokenizer = streamed(ids, [], stop)
    if not detokenizer.stopped:
        return
    used = detokenizer.num_tokens_used
    string = detokenizer.stop_string

    def complete(count):  # without what later bytes could still change
        return TOKENIZER.decode(ids[:count], continues=True)

    if "\ufffd" not in complete(len(ids)):
        assert string in complete(used)
        assert string not in complete(used - 1)


@settings(max_examples=500, deadline=None)
@given(TOKENS, STOPS)
def test_what_was_shown_is_never_taken_back_and_little_is_held(ids, stop):
    """After every token the text shown is a beginning of the final text, and at most one
    character and the beginning of one stop string are missing."""
    final = TOKENIZER.decode(ids, continues=True)
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop)
    shown = ""
    longest = max(map(len, stop), default=0)
    for count, index in enumerate(ids, 1):
        shown += detokenizer.push([index])
        if detokenizer.stopped:
            break
        assert final.startswith(shown)
        complete = TOKENIZER.decode(ids[:count], continues=True).rstrip("\ufffd")
        assert len(shown) >= len(complete) - max(0, longest - 1)


def push_each(detokenizer, ids):
    return [detokenizer.push([index]) for index in ids]


def test_bytes_are_held_until_their_character_is_complete():
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert push_each(detokenizer, "a😀é".encode()) == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.finish() == ""
    assert detokenizer.finish() == ""


def test_an_unfinished_character_becomes_one_replacement_character():
    detokenizer = IncrementalDetokenizer(TOKENIZER, track_pieces=True)
    assert push_each(detokenizer, b"a\xf0\x9f\x98") == ["a", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.pieces == ["a", "", "", "\ufffd"]


def test_broken_bytes_are_shown_as_soon_as_they_are_known_to_be_broken():
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert push_each(detokenizer, b"\xf0\x9fa\xffb") == ["", "", "\ufffda", "\ufffd", "b"]


def test_the_beginning_of_a_stop_is_held_and_given_back():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["\n\nUser:"])
    assert detokenizer.push(b"hi\n\nUse") == "hi"
    assert detokenizer.push(b"ful") == "\n\nUseful"
    assert detokenizer.push(b"\n\n") == ""
    assert detokenizer.finish() == "\n\n"
    assert not detokenizer.stopped


def test_a_stop_inside_one_token_and_tokens_after_it():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["b"], track_pieces=True)
    assert detokenizer.push([ord("x"), 257, ord("y")]) == "xa"
    assert (detokenizer.stopped, detokenizer.stop_string) == (True, "b")
    assert detokenizer.num_tokens_used == 2
    assert detokenizer.pieces == ["x", "a"]
    assert detokenizer.push([ord("z")]) == "" == detokenizer.finish()


def test_a_stop_that_ends_in_the_flush():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["\ufffd"])
    assert detokenizer.push([ord("a"), 0xF0]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped


def test_of_two_stops_the_one_that_begins_first_wins():
    text = b"x<tool_call>y"
    for stop in (["tool", "<tool_call>"], ["<tool_call>", "tool"]):
        detokenizer = IncrementalDetokenizer(TOKENIZER, stop)
        deltas = push_each(detokenizer, text)
        assert "".join(deltas) == "x"
        assert detokenizer.stop_string == "<tool_call>"
        assert detokenizer.num_tokens_used == len(b"x<tool_call>")


def test_a_match_that_waited_is_decided_when_the_longer_one_fails():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["tool", "<tool_call>"])
    assert detokenizer.push(b"x<tool") == "x"
    assert not detokenizer.stopped
    assert detokenizer.push(b"b") == "<"
    assert (detokenizer.stop_string, detokenizer.num_tokens_used) == ("tool", len(b"x<tool"))


def test_a_match_that_waits_at_the_end_counts():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["tool", "<tool_call>"])
    assert detokenizer.push(b"x<tool_c") == "x"
    assert detokenizer.finish() == "<"
    assert detokenizer.stopped
    assert detokenizer.num_tokens_used == len(b"x<tool")


def test_special_tokens_are_left_out_or_shown():
    hidden, shown = (
        IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip) for skip in (True, False)
    )
    assert hidden.push([ord("a"), SPECIAL]) == "a"
    assert shown.push([ord("a"), SPECIAL]) == "a<end>"
    assert hidden.num_tokens_used == 2


def test_an_empty_stop_and_untracked_pieces_are_mistakes_of_the_caller():
    with pytest.raises(ValueError, match="empty"):
        IncrementalDetokenizer(TOKENIZER, ["a", ""])
    with pytest.raises(ValueError, match="not tracked"):
        _ = IncrementalDetokenizer(TOKENIZER).pieces


def test_work_does_not_grow_with_the_stop_string():
    """A stop that almost matches, again and again: each character is looked at a bounded number
    of times (counted, not timed)."""
    from router.text.detokenizer import _StopMatcher

    class CountedStop(str):
        looks = 0

        def __getitem__(self, index):
            CountedStop.looks += 1
            return super().__getitem__(index)

    matcher = _StopMatcher(CountedStop("a" * 1000 + "b"))
    CountedStop.looks = 0
    text = ("a" * 999 + "c") * 20
    for character in text:
        assert not matcher.feed(character)
    assert CountedStop.looks <= 4 * len(text)


# ---------------------------------------------------------------- a real tokenizer


@pytest.fixture(scope="module")
def smollm2():
    files: ModelFiles = smollm2_files()
    return load_tokenizer(files)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_any_tokens_of_a_real_model(smollm2, ids, cuts):
    detokenizer = IncrementalDetokenizer(smollm2)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text = "".join(detokenizer.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    assert text + detokenizer.finish() == smollm2._tokenizer.decode(ids)


def test_a_real_text_token_by_token(smollm2):
    text = "naïve 😀👨‍👩‍👧 你好 e\u0301\n12"
    detokenizer = IncrementalDetokenizer(smollm2, track_pieces=True)
    deltas = push_each(detokenizer, smollm2.encode(text))
    assert "".join(deltas) + detokenizer.finish() == text
    assert "\ufffd" not in "".join(deltas)
    assert deltas == detokenizer.pieces
