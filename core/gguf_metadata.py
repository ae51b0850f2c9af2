"""Reads the metadata of a GGUF file without its tensors.

The `gguf` package builds one numpy view per array element: two seconds for a tokenizer of 49k
tokens and 49k merges. This reader walks the header once with `struct` and takes milliseconds. It
checks every length against the file, since a model file may be cut off or hostile.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from core.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_ARRAY_DEPTH = 4


def read_gguf_metadata(path: Path, prefix: str = "") -> dict[str, Any]:
    """Every key that begins with `prefix`; arrays become lists, strings `str`.

    Raises ModelError when the file is not a whole little-endian GGUF of version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata(prefix)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, struct.error, OverflowError) as error:
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def metadata(self, prefix: str) -> dict[str, Any]:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3 in little-endian order")
        self._scalar("Q")  # number of tensors
        found = {}
        for _ in range(self._scalar("Q")):
            key = self._string()
            kind = self._scalar("I")
            value = self._value(kind, wanted=key.startswith(prefix))
            if key.startswith(prefix):
                found[key] = value
        return found

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise ValueError("it ends in the middle of its metadata")
        chunk = self._data[self._at : end]
        self._at = end
        return chunk

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        # A vocabulary may hold tokens that are no valid UTF-8; a template or a name never is.
        return self._bytes(self._scalar("Q")).decode("utf-8", "replace")

    def _value(self, kind: int, wanted: bool, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            if depth >= _MAX_ARRAY_DEPTH:
                raise ValueError("arrays nested too deeply")
            return self._array(self._scalar("I"), self._scalar("Q"), wanted, depth)
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int, wanted: bool, depth: int) -> list[Any]:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            size = count * struct.calcsize("<" + code)
            if size > self._size:
                raise ValueError("an array is longer than the file")
            chunk = self._bytes(size)
            return list(struct.unpack(f"<{count}{code}", chunk)) if wanted else []
        if kind == _STRING:
            return self._strings(count, wanted)
        values = []
        for _ in range(count):
            values.append(self._value(kind, wanted, depth + 1))
        return values

    def _strings(self, count: int, wanted: bool) -> list[str]:
        """The hot loop: a tokenizer holds 100 000 strings and more."""
        data, size, at = self._data, self._size, self._at
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > size:
                raise ValueError("it ends in the middle of its metadata")
            end = at + 8 + read_length(data, at)[0]
            if end > size:
                raise ValueError("it ends in the middle of its metadata")
            if wanted:
                strings.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return strings
