"""KV over gRPC: the prefill worker streams its blocks, the decode worker copies them into place.

A stream carries the blocks' bytes one after the other, in the order that was asked for, in pieces
that know nothing of block edges. Flow control is HTTP/2's: a slow reader holds up the sender, so
neither side buffers more than a few pieces.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
import torch

from core.errors import HandoverError
from kv_transfer.base import KVTransfer, Peer, block_bytes, check_block_ids
from kv_transfer.memory import flat_bytes, keep_freed_memory
from rpc import worker_pb2 as pb
from rpc.channel import make_channel
from rpc.status import error_from_rpc

_PIECE_BYTES = 1 << 20
_METHOD = "/pdserve.worker.v1.KvService/Pull"
_DATA_TAG = 0x0A  # field 1, length-delimited


async def stream_blocks(
    kv_cache: torch.Tensor, block_ids: Sequence[int], piece_bytes: int = _PIECE_BYTES
) -> AsyncIterator[pb.KvPiece]:
    """The server's half: the bytes of `block_ids` in order. The caller has checked that the
    blocks are pinned for the request, and keeps them so until the stream has ended. Raises
    HandoverError for ids outside of the cache."""
    check_block_ids(block_ids, kv_cache.shape[0], range(len(block_ids)), len(block_ids))
    read = _reader(kv_cache)
    for spans in _pieces(_runs(block_ids, block_bytes(kv_cache)), piece_bytes):
        yield pb.KvPiece(data=read(spans))


@dataclass(slots=True)
class _Connection:
    incarnation: str
    address: str
    channel: grpc.aio.Channel


class GrpcTransfer(KVTransfer):
    """Owns one channel for each peer it has pulled from.

    Pieces are written into the cache by the task that awaits `pull`, so that once it has ended,
    however it did, nothing writes any more. A stream that is silent for `stall_s`, ends early or
    brings more than was asked for is a HandoverError.
    """

    name = "grpc"

    def __init__(self, kv_cache: torch.Tensor, *, stall_s: float = 10.0) -> None:
        self.kv_cache = kv_cache
        self._block_bytes = block_bytes(kv_cache)
        self._stall_s = stall_s
        self._connections: dict[str, _Connection] = {}
        self._pulled_from: set[tuple[str, str]] = set()
        self._closing: set[asyncio.Task] = set()
        self._is_closed = False
        keep_freed_memory()

    def offer(self) -> bytes:
        return b""

    async def pull(
        self,
        peer: Peer,
        request_id: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
    ) -> None:
        if self._is_closed:
            raise HandoverError("the KV transport is closed")
        check_block_ids(remote_block_ids, None, local_block_ids, self.kv_cache.shape[0])
        if not local_block_ids:
            return
        request = pb.PullRequest(
            request_id=request_id, incarnation=peer.incarnation, block_ids=remote_block_ids
        )
        writer = _Writer(self.kv_cache, _runs(local_block_ids, self._block_bytes))
        call = self._method(peer)(request)
        try:
            while (message := await self._next(call, peer)) is not None:
                writer.write(_data_of(message), peer.worker_id)
            writer.finish(peer.worker_id)
        except grpc.aio.AioRpcError as error:
            raise HandoverError(error_from_rpc(error, peer.worker_id).message) from error
        except asyncio.CancelledError as error:
            # Closing a channel cancels its calls, and that surfaces as if the task were
            # cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise HandoverError(f"{peer.worker_id}: the connection was closed") from error
        finally:
            call.cancel()
        self._pulled_from.add((peer.worker_id, peer.incarnation))

    async def _next(self, call: grpc.aio.UnaryStreamCall, peer: Peer) -> bytes | None:
        try:
            async with asyncio.timeout(self._stall_s):
                message = await call.read()
        except TimeoutError:
            raise HandoverError(f"{peer.worker_id} sent no KV for {self._stall_s:g} s") from None
        return None if message is grpc.aio.EOF else message

    def _method(self, peer: Peer) -> grpc.aio.UnaryStreamMultiCallable:
        connection = self._connections.get(peer.worker_id)
        if connection is None or (connection.incarnation, connection.address) != (
            peer.incarnation,
            peer.address,
        ):
            self.forget(peer.worker_id)
            connection = _Connection(peer.incarnation, peer.address, make_channel(peer.address))
            self._connections[peer.worker_id] = connection
        # No deserializer: parsing a piece would copy it once more.
        return connection.channel.unary_stream(
            _METHOD, request_serializer=pb.PullRequest.SerializeToString
        )

    def carrier(self, peer: Peer) -> str:
        return "tcp" if (peer.worker_id, peer.incarnation) in self._pulled_from else ""

    def forget(self, worker_id: str) -> None:
        self._pulled_from = {key for key in self._pulled_from if key[0] != worker_id}
        if connection := self._connections.pop(worker_id, None):
            task = asyncio.ensure_future(connection.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._is_closed = True
        for worker_id in list(self._connections):
            self.forget(worker_id)
        if self._closing:
            await asyncio.wait(self._closing)


Span = tuple[int, int]  # a range of bytes in the flat cache, end excluded


def _runs(block_ids: Sequence[int], size: int) -> list[Span]:
    """Where the blocks lie, neighbours joined, in order."""
    runs: list[Span] = []
    for block_id in block_ids:
        start = block_id * size
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + size)
        else:
            runs.append((start, start + size))
    return runs


def _pieces(runs: list[Span], piece_bytes: int) -> Iterator[list[Span]]:
    """The runs cut into groups of `piece_bytes` together; the last may be smaller."""
    piece: list[Span] = []
    room = piece_bytes
    for start, end in runs:
        while start < end:
            step = min(room, end - start)
            piece.append((start, start + step))
            start += step
            room -= step
            if room == 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece


def _reader(kv_cache: torch.Tensor):
    """A function from spans to their bytes, joined."""
    if kv_cache.device.type == "cpu":
        memory = flat_bytes(kv_cache).reshape(-1).data
        return lambda spans: b"".join([memory[start:end] for start, end in spans])
    flat = kv_cache.view(torch.uint8).view(-1)

    def read(spans: list[Span]) -> bytes:
        staged = torch.empty(
            sum(end - start for start, end in spans), dtype=torch.uint8, pin_memory=True
        )
        offset = 0
        for start, end in spans:
            staged[offset : offset + end - start].copy_(flat[start:end])
            offset += end - start
        return staged.numpy().tobytes()

    return read


class _Writer:
    """Fills `runs` of the cache with consecutive bytes."""

    def __init__(self, kv_cache: torch.Tensor, runs: list[Span]) -> None:
        self._runs = iter(runs)
        self._start, self._end = next(self._runs)
        self._expected = sum(end - start for start, end in runs)
        self._received = 0
        self._cuda = None if kv_cache.device.type == "cpu" else kv_cache.view(torch.uint8).view(-1)
        self._memory = flat_bytes(kv_cache).reshape(-1) if self._cuda is None else None

    def write(self, data: memoryview, who: str) -> None:
        """Raises HandoverError, with nothing of `data` written, if it is more than is missing."""
        self._received += len(data)
        if self._received > self._expected:
            raise HandoverError(f"{who} sent more than the {self._expected} bytes of KV asked for")
        source = np.frombuffer(data, dtype=np.uint8)
        while len(source):
            if self._start == self._end:
                self._start, self._end = next(self._runs)
            step = min(len(source), self._end - self._start)
            self._put(source[:step])
            source = source[step:]
            self._start += step

    def _put(self, source: np.ndarray) -> None:
        stop = self._start + len(source)
        if self._memory is not None:
            self._memory[self._start : stop] = source
        elif self._cuda is not None:
            # Staged, and waited for: nothing may write any more once `pull` has ended.
            staged = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
            staged.numpy()[:] = source
            self._cuda[self._start : stop].copy_(staged)

    def finish(self, who: str) -> None:
        if self._received < self._expected:
            raise HandoverError(f"{who} sent {self._received} of {self._expected} bytes of KV")


def _data_of(message: bytes) -> memoryview:
    """`KvPiece.data` of a serialized message, without a copy in its usual form: one field."""
    if message and message[0] == _DATA_TAG:
        length = shift = 0
        for position in range(1, min(len(message), 6)):
            length |= (message[position] & 0x7F) << shift
            shift += 7
            if message[position] < 0x80:
                if length == len(message) - position - 1:
                    return memoryview(message)[position + 1 :]
                break
    return memoryview(pb.KvPiece.FromString(message).data)
