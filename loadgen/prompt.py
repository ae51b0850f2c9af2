"""Prompts of exact lengths, with and without knowing the server's tokenizer."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadgen.record import Segment

# Common words: one token each, with the space before, in the byte-pair vocabularies of our time.
_WORDS_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea kid body information back parent face others level
office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense product effect interest
death course form report role field site color station nature road table sound wall window glass
river tree sea north south east west green blue red white black light heart paper letter voice
stone bridge garden
"""
WORDS = tuple(_WORDS_TEXT.split())


class PromptMaker(Protocol):
    def make(self, segments: Sequence[Segment]) -> str | list[int]: ...


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts as lists of token ids from [low, high): their length is exact on every model that
    has those ids. The default leaves out the special and byte tokens that vocabularies begin
    with."""

    low: int = 1000
    high: int = 30000

    def make(self, segments: Sequence[Segment]) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            ids += _draw(segment, self.high - self.low, segment.num_tokens, self.low)
        return ids


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Prompts as text. A prompt of n words has about `overhead + n * tokens_per_word` tokens,
    which `fit_words` measures."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def make(self, segments: Sequence[Segment]) -> str:
        words: list[str] = []
        tokens = done = 0
        for segment in segments:
            tokens += segment.num_tokens
            # Edges are converted, not sizes: shared segments stay shared.
            end = max(1, round((tokens - self.overhead) / self.tokens_per_word))
            words += [WORDS[i] for i in _draw(segment, len(WORDS), max(0, end - done), 0)]
            done = max(done, end)
        return " ".join(words)


def fit_words(small: tuple[int, int], large: tuple[int, int]) -> WordPrompts:
    """From two probes, each (number of words, prompt tokens that the server counted)."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return WordPrompts(max(0.1, slope), small[1] - small[0] * slope)


def _draw(segment: Segment, span: int, count: int, low: int) -> list[int]:
    """The first `count` of the segment's own endless sequence."""
    seed = int.from_bytes(hashlib.blake2b(segment.key.encode(), digest_size=8).digest())
    rng = np.random.default_rng(seed)
    return [int(i) for i in low + (rng.random(count) * span).astype(np.int64)]
