"""KV as a stream of bytes: what the gRPC transport sends, cut into pieces and put back in place.

A stream carries spans of the source's cache one after the other, in the order that was asked for,
in pieces that know nothing of block edges. A piece travels as a serialized `KvPiece`, made and read
here by hand: protobuf would copy it once more on each side.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from core.errors import HandoverError
from kv_transfer.cuda_stage import CudaStage
from kv_transfer.memory import flat_bytes

PIECE_BYTES = 1 << 20
# Fields of KvPiece, length-delimited.
DATA_TAG = 0x0A  # data, field 1
ENCODED_TAG = 0x12  # encoded, field 2

# A range of bytes: offset and length in one block; start and end, excluded, in the flat cache.
Span = tuple[int, int]


def runs(
    block_ids: Sequence[int], size: int, spans: Sequence[Sequence[Span]] | None = None
) -> list[Span]:
    """Where the blocks lie in the flat cache, or `spans[i]` of the i-th, neighbours joined, in
    order. `size`: bytes of a block."""
    found: list[Span] = []
    for i, block_id in enumerate(block_ids):
        for offset, length in ((0, size),) if spans is None else spans[i]:
            start = block_id * size + offset
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], start + length)
            else:
                found.append((start, start + length))
    return found


def groups(spans: list[Span], piece_bytes: int) -> Iterator[list[Span]]:
    """Runs cut into groups of `piece_bytes` together; the last may be smaller."""
    group: list[Span] = []
    room = piece_bytes
    for start, end in spans:
        while start < end:
            step = min(room, end - start)
            group.append((start, start + step))
            start += step
            room -= step
            if room == 0:
                yield group
                group, room = [], piece_bytes
    if group:
        yield group


def serialized(parts: Sequence[memoryview | bytes], tag: int = DATA_TAG) -> bytes:
    """A `KvPiece` whose one field is `parts`, joined: one copy in all."""
    length = sum(map(len, parts))
    header = bytearray((tag,))
    while length > 0x7F:
        header.append(length & 0x7F | 0x80)
        length >>= 7
    header.append(length)
    return b"".join([header, *parts])


def data_of(message: bytes, tag: int = DATA_TAG) -> memoryview | None:
    """The field of a serialized `KvPiece` that has no other; None for other messages."""
    if not message or message[0] != tag:
        return None
    length = shift = 0
    for position in range(1, min(len(message), 6)):
        length |= (message[position] & 0x7F) << shift
        shift += 7
        if message[position] < 0x80:
            is_whole = length == len(message) - position - 1
            return memoryview(message)[position + 1 :] if is_whole else None
    return None


def reader(kv_cache: torch.Tensor) -> Callable[[list[Span]], list[memoryview]]:
    """A function from spans of the flat cache to their bytes."""
    if kv_cache.device.type == "cpu":
        memory = flat_bytes(kv_cache).reshape(-1).data
        return lambda spans: [memory[start:end] for start, end in spans]
    stage = CudaStage(kv_cache)
    return lambda spans: [stage.read(spans)]


class Writer:
    """Fills spans of the cache with consecutive bytes."""

    def __init__(self, kv_cache: torch.Tensor, spans: list[Span]) -> None:
        self._spans = iter(spans)
        self._start, self._end = next(self._spans)
        self._expected = sum(end - start for start, end in spans)
        self._received = 0
        self._stage = None if kv_cache.device.type == "cpu" else CudaStage(kv_cache)
        self._memory = flat_bytes(kv_cache).reshape(-1) if self._stage is None else None

    def write(self, data: memoryview, who: str) -> None:
        """Raises HandoverError, with nothing of `data` written, if it is more than is missing."""
        self._received += len(data)
        if self._received > self._expected:
            raise HandoverError(f"{who} sent more than the {self._expected} bytes of KV asked for")
        source = np.frombuffer(data, dtype=np.uint8)
        while len(source):
            if self._start == self._end:
                self._start, self._end = next(self._spans)
            step = min(len(source), self._end - self._start)
            self._put(source[:step])
            source = source[step:]
            self._start += step

    def _put(self, source: np.ndarray) -> None:
        stop = self._start + len(source)
        if self._memory is not None:
            self._memory[self._start : stop] = source
        elif self._stage is not None:
            self._stage.write(self._start, source)

    def finish(self, who: str) -> None:
        if self._received < self._expected:
            raise HandoverError(f"{who} sent {self._received} of {self._expected} bytes of KV")
