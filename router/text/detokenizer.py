"""Text of a stream of tokens, as it may be shown.

Two things hold text back: a character whose bytes have not all come, and text that may turn out
to be the beginning of a stop string. Both are decided on bytes and characters, one after the
other, so how the tokens were grouped on their way never changes the text.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from router.text.tokenizer import Tokenizer


class _StopMatcher:
    """Finds one stop string in characters that come one by one (Knuth, Morris and Pratt 1977).

    `matched` is how many characters of the stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # fallback[n]: the longest proper beginning of stop[:n] that also ends it.
        self._fallback = [0] * (len(stop) + 1)
        k = 0
        for n in range(1, len(stop)):
            while k and stop[n] != stop[k]:
                k = self._fallback[k]
            k += stop[n] == stop[k]
            self._fallback[n + 1] = k

    def feed(self, character: str) -> bool:
        """True when `character` completes the stop string. Not to be called after that."""
        stop, n = self.stop, self.matched
        while n and stop[n] != character:
            n = self._fallback[n]
        self.matched = n + (stop[n] == character)
        return self.matched == len(stop)


@dataclass(frozen=True, slots=True)
class _Match:
    start: int  # in characters of the whole text
    stop: str
    num_tokens: int  # up to the token that completed it


class IncrementalDetokenizer:
    """Turns the tokens of one choice into text, cut at the earliest match of any stop string.

    The earliest match is the one that begins first (of two that begin together, the one that is
    complete first). A complete match waits while another one that began before it may still
    come true; `stopped` is set when it is decided.

    Invariants. All deltas joined, with `finish()`'s, are `tokenizer.decode(ids, continues=True)`
    cut there, whatever the chunks were. A delta never ends inside a character. Work is constant
    per character and text held back is shorter than the longest stop string.

    `num_tokens_used`: tokens up to the one that completed the stop string; all, if none did.
    `pieces` (if tracked): the text of each of these tokens; joined they are the text shown. A
    character belongs to the token that completes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        track_pieces: bool = False,
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_special`: special tokens that are text all the same."""
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown_special = shown_special
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(text) for text in dict.fromkeys(stop)]
        self._first_characters = {text[0] for text in stop}
        self._match: _Match | None = None
        self._held = ""  # decoded and not shown
        self._num_shown = 0  # characters before `_held`
        self._num_seen = 0  # characters that the matchers have seen
        self._num_tokens = 0
        self._pieces: list[str] | None = [] if track_pieces else None
        self._is_finished = False
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        return self._match.stop if self._match is not None and self.stopped else None

    @property
    def num_tokens_used(self) -> int:
        if self._match is not None and self.stopped:
            return self._match.num_tokens
        return self._num_tokens

    @property
    def pieces(self) -> list[str]:
        if self._pieces is None:
            raise ValueError("pieces were not tracked")
        return self._pieces

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that may be shown now. Tokens after the stop are ignored."""
        shown = []
        for index in token_ids:
            if self.stopped or self._is_finished:
                break
            shown.append(self._push_token(index))
        return "".join(shown)

    def finish(self) -> str:
        """The rest, when no token will come: what was held, bytes without their character as
        U+FFFD. A match that was waiting is decided."""
        if self.stopped or self._is_finished:
            return ""
        self._is_finished = True
        tail = self._decoder.decode(b"", final=True)
        if self._pieces and tail:
            self._pieces[-1] += tail
        shown = self._take(tail)
        if not self.stopped:
            shown += self._cut(self._match) if self._match else self._show(len(self._held))
        return shown

    def _push_token(self, index: int) -> str:
        self._num_tokens += 1
        text = ""
        if not self._is_hidden(index):
            text = self._decoder.decode(self._tokenizer.id_to_bytes(index))
        if self._pieces is not None:
            self._pieces.append(text)
        return self._take(text) if text else ""

    def _is_hidden(self, index: int) -> bool:
        return (
            self._skips_special
            and self._tokenizer.is_special(index)
            and index not in self._shown_special
        )

    def _take(self, text: str) -> str:
        """Adds decoded text; returns what may be shown."""
        self._held += text
        if len(self._held) == len(text) and self._first_characters.isdisjoint(text):
            self._num_seen += len(text)  # nothing was begun and nothing begins
            return self._show(len(text))
        for character in text:
            self._num_seen += 1
            self._advance(character)
            if self._match is not None and not self._matchers:
                return self._cut(self._match)
        # Matchers that are left began before the match, if there is one.
        begun = max((matcher.matched for matcher in self._matchers), default=0)
        return self._show(len(self._held) - begun)

    def _advance(self, character: str) -> None:
        for matcher in self._matchers:
            if matcher.feed(character):
                start = self._num_seen - len(matcher.stop)
                if self._match is None or start < self._match.start:
                    self._match = _Match(start, matcher.stop, self._num_tokens)
        if self._match is not None:
            begun_at = self._match.start  # only what began earlier can still win
            self._matchers = [m for m in self._matchers if self._num_seen - m.matched < begun_at]

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._num_shown += count
        return shown

    def _cut(self, match: _Match) -> str:
        """Ends the text at the match; returns the last of it."""
        self.stopped = True
        end = match.start + (len(match.stop) if self._include_stop else 0)
        shown = self._show(end - self._num_shown)
        self._held = ""
        if self._pieces is not None:
            del self._pieces[match.num_tokens :]
            excess = sum(map(len, self._pieces)) - end
            for position in range(len(self._pieces) - 1, -1, -1):
                if excess <= 0:
                    break
                piece = self._pieces[position]
                self._pieces[position] = piece[: max(0, len(piece) - excess)]
                excess -= len(piece)
        return shown
