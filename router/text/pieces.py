"""Long texts, tokenised piece by piece, and pieces remembered.

A text is cut between two words, where its tokenizer cuts anyway, whatever stands before and behind;
so the ids of the pieces, one after the other, are those of the text. Pieces that are new are
tokenised side by side, and those of a prompt that came before (a system prompt, a document, all
earlier turns of a chat) are not tokenised again: where cuts are depends on what stands before them
alone.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import normalizers as n

# Characters after which a piece ends at the next place that can be cut.
PIECE = 1024
_MAX_PIECES = 4096  # remembered: a text, and ids of 4 bytes; about 10 MB
_CUT = re.compile("[A-Za-z](?= [A-Za-z])")
_KEEP_WORDS = (n.NFC, n.NFD, n.NFKC, n.NFKD)
_PROBES = ("the cat", "Zz aA", "don't stop", "A b", "x3y z4", "naïve test")


def cuts_between_words(tokenizer: RustTokenizer) -> bool:
    """Whether ids of a text are those of the parts before and from a space between two ASCII
    letters on, for every text."""
    if tokenizer.normalizer is not None and not isinstance(tokenizer.normalizer, _KEEP_WORDS):
        return False
    if tokenizer.pre_tokenizer is None:
        return False
    for probe in _PROBES:
        space = probe.index(" ")
        parts = tokenizer.pre_tokenizer.pre_tokenize_str(probe)
        if not any(start == space for _, (start, _) in parts):
            return False
    return not any(map(_reaches_over, tokenizer.get_added_tokens_decoder().values()))


def _reaches_over(token: AddedToken) -> bool:
    """Whether an added token may have a place to cut inside, or take the space behind it."""
    text = token.content
    is_open = (token.lstrip and text[:1].isalpha()) or (token.rstrip and text[-1:].isalpha())
    return is_open or _CUT.search(text) is not None


class PieceCache:
    """Tokenises long texts of one tokenizer. Safe to use from several threads."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]]) -> None:
        """`encode`: ids of each of some texts, without special tokens around them."""
        self._encode = encode
        self._lock = threading.Lock()
        # By salt and text, the oldest use first.
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def encode(self, text: str, cache_salt: str = "") -> list[int]:
        """Only for a tokenizer that `cuts_between_words`. What was seen with another salt is not
        remembered: nobody can tell by the time it takes."""
        *whole, rest = pieces(text)
        with self._lock:
            found = {piece: self._known.get((cache_salt, piece)) for piece in whole}
        missing = [piece for piece, ids in found.items() if ids is None]
        *made, last = self._encode([*missing, rest])
        for piece, piece_ids in zip(missing, made, strict=True):
            found[piece] = array("I", piece_ids)
        self._remember(cache_salt, found)
        ids: list[int] = []
        for piece in whole:
            known = found[piece]
            assert known is not None
            ids += known
        return ids + last

    def num_new(self, text: str, cache_salt: str = "") -> int:
        """How many characters `encode` would have to tokenise."""
        *whole, rest = pieces(text)
        with self._lock:
            new = [piece for piece in whole if (cache_salt, piece) not in self._known]
        return sum(map(len, new)) + len(rest)

    def _remember(self, cache_salt: str, used: dict[str, "array[int] | None"]) -> None:
        with self._lock:
            for piece, ids in used.items():
                assert ids is not None
                self._known[cache_salt, piece] = ids
                self._known.move_to_end((cache_salt, piece))
            while len(self._known) > _MAX_PIECES:
                self._known.popitem(last=False)


def pieces(text: str) -> Iterator[str]:
    """The parts of a text, at least one. All but the last end where the next begins with a space
    between two words."""
    start = 0
    while (cut := _CUT.search(text, start + PIECE)) is not None:
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]
