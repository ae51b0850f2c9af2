"""What API keys are using: in one process, or in a file that several processes share.

A level is of a bucket that fills with time: how much was in it, and when that was, on the
machine's monotonic clock.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from core.errors import ConfigError
from router.processes.share import MAX_PROCESSES, Share

Kind = Literal["requests", "tokens"]
MAX_KEYS = 4096
_ID_BYTES = 16
_LEVELS = struct.Struct("=4d")  # level and time, of requests and of tokens
_COUNT = struct.Struct("=I")
_SLOT_BYTES = _ID_BYTES + _LEVELS.size + MAX_PROCESSES * _COUNT.size


class Usage:
    """Of one key, in this process. Everything is read and written inside `locked`."""

    def __init__(self) -> None:
        self._levels: dict[Kind, tuple[float, float]] = {}
        self._in_flight = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def level(self, kind: Kind) -> tuple[float, float] | None:
        """None: nothing was ever taken."""
        return self._levels.get(kind)

    def set_level(self, kind: Kind, level: float, at: float) -> None:
        self._levels[kind] = (level, at)

    def in_flight(self) -> int:
        return self._in_flight

    def add_in_flight(self, change: int) -> None:
        self._in_flight += change


class SharedUsage(Usage):
    """Of one key, in all processes. What runs is counted for each process by itself, so that one
    that is killed takes along what it had."""

    def __init__(self, file: "UsageFile", position: int) -> None:
        self._file = file
        self._at = position

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._file.locked():
            yield

    def level(self, kind: Kind) -> tuple[float, float] | None:
        level, at = self._levels_of(kind)
        return (level, at) if at else None

    def set_level(self, kind: Kind, level: float, at: float) -> None:
        levels = list(_LEVELS.unpack_from(self._file.data, self._at + _ID_BYTES))
        first = 0 if kind == "requests" else 2
        levels[first : first + 2] = level, at
        _LEVELS.pack_into(self._file.data, self._at + _ID_BYTES, *levels)

    def in_flight(self) -> int:
        return sum(self._count(index) for index in range(self._file.share.count))

    def add_in_flight(self, change: int) -> None:
        own = self._file.share.index
        count = max(0, self._count(own) + change)
        _COUNT.pack_into(self._file.data, self._count_at(own), count)

    def _levels_of(self, kind: Kind) -> tuple[float, float]:
        levels = _LEVELS.unpack_from(self._file.data, self._at + _ID_BYTES)
        return levels[:2] if kind == "requests" else levels[2:]

    def _count(self, index: int) -> int:
        return int(_COUNT.unpack_from(self._file.data, self._count_at(index))[0])

    def _count_at(self, index: int) -> int:
        return self._at + _ID_BYTES + _LEVELS.size + index * _COUNT.size


class UsageFile:
    """The file, in memory: a slot for each key, under the first bytes of its hash. Nobody but the
    router's own user may read it. Locks are of this process: one thread at a time."""

    def __init__(self, share: Share) -> None:
        """Takes over this process's number: what an earlier process of it had is gone."""
        self.share = share
        self._fd = os.open(share.usage_path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, MAX_KEYS * _SLOT_BYTES)
        self.data = mmap.mmap(self._fd, MAX_KEYS * _SLOT_BYTES)
        with self.locked():
            for position in self._taken():
                usage = SharedUsage(self, position)
                usage.add_in_flight(-usage._count(share.index))

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def of(self, sha256: str) -> SharedUsage:
        """The slot of a key; a new one the first time. Raises ConfigError if there is none."""
        name = bytes.fromhex(sha256)[:_ID_BYTES]
        with self.locked():
            for position in range(0, len(self.data), _SLOT_BYTES):
                there = self.data[position : position + _ID_BYTES]
                if there == bytes(_ID_BYTES):
                    self.data[position : position + _ID_BYTES] = name
                    there = name
                if there == name:
                    return SharedUsage(self, position)
        raise ConfigError(f"router.api_keys_file: more than {MAX_KEYS} keys since the start")

    def close(self) -> None:
        self.data.close()
        os.close(self._fd)

    def _taken(self) -> Iterator[int]:
        for position in range(0, len(self.data), _SLOT_BYTES):
            if self.data[position : position + _ID_BYTES] == bytes(_ID_BYTES):
                return
            yield position
