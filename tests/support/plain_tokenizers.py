"""Byte-level BPE and SentencePiece BPE in plain Python, and small vocabularies for them: what the
tokenizers of the project are held against."""

from functools import cache

import regex
from hypothesis import strategies as st

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


def byte_characters():
    """GPT-2's bytes_to_unicode, as in its paper's code: printable bytes first."""
    keep = [b for b in range(256) if chr(b).isprintable() and b != 0x20 and b != 0xAD]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}


BYTE_TOKENS = list(byte_characters().values())
WORDS = ["he", "ll", "hell", "hello", "Ġw", "Ġhello", "12", "123"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ hello", "1 2", "12 3"]


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
