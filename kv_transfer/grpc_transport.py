"""KV over gRPC: the prefill worker streams its blocks, the decode worker copies them into place.

What a stream carries is in `wire.py`. Flow control is HTTP/2's: a slow reader holds up the sender,
so neither side buffers more than a few pieces.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import torch

from core.errors import HandoverError
from kv_transfer.base import (
    KVTransfer,
    Peer,
    Pieces,
    block_bytes,
    check_block_ids,
    check_pieces,
)
from kv_transfer.encoding import Encoding
from kv_transfer.memory import keep_freed_memory
from kv_transfer.wire import (
    ENCODED_TAG,
    PIECE_BYTES,
    Writer,
    data_of,
    groups,
    reader,
    runs,
    serialized,
)
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.channel import make_channel
from rpc.status import error_from_rpc

_SERVICE = "pdserve.worker.v1.KvService"


def add_kv_service(service: worker_pb2_grpc.KvServiceServicer, server: grpc.aio.Server) -> None:
    """Serves `service`, whose `Pull` writes what `stream_blocks` yields: pieces that are
    serialized already, which the generated code would not take."""
    handlers = {
        "Attach": grpc.unary_stream_rpc_method_handler(
            service.Attach, pb.AttachRequest.FromString, pb.KvEvent.SerializeToString
        ),
        "Release": grpc.unary_unary_rpc_method_handler(
            service.Release, pb.ReleaseRequest.FromString, pb.ReleaseResponse.SerializeToString
        ),
        "Pull": grpc.unary_stream_rpc_method_handler(service.Pull, pb.PullRequest.FromString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


async def stream_blocks(
    kv_cache: torch.Tensor, request: pb.PullRequest, piece_bytes: int = PIECE_BYTES
) -> AsyncIterator[bytes]:
    """The server's half: what `request` asks for, in order, as serialized `KvPiece`s. The caller
    has checked that the blocks are pinned for the request, and keeps them so until the stream has
    ended. Raises HandoverError for what is outside of the cache or of a block."""
    ids, size = request.block_ids, block_bytes(kv_cache)
    check_block_ids(ids, kv_cache.shape[0], range(len(ids)), len(ids))
    spans = None
    if request.spans:
        kinds = [list(zip(kind.offsets, kind.lengths, strict=False)) for kind in request.spans]
        for kind, sent in zip(kinds, request.spans, strict=True):
            is_whole = len(sent.offsets) == len(sent.lengths)
            if not is_whole or any(o + n > size or n == 0 for o, n in kind):
                raise HandoverError(f"spans asked for do not lie in blocks of {size} bytes")
        if len(request.spans_of) != len(ids) or max(request.spans_of, default=0) >= len(kinds):
            raise HandoverError("spans asked for and blocks do not match")
        spans = [kinds[kind] for kind in request.spans_of]
    encoding = _encoding_of(request, kv_cache)
    read = reader(kv_cache)
    for group in groups(runs(ids, size, spans), encoding.piece_bytes(piece_bytes)):
        parts = read(group)
        if encoding.name == "none":
            yield serialized(parts)
        else:
            encoded = await asyncio.to_thread(encoding.encode, b"".join(parts))
            yield serialized([encoded], ENCODED_TAG)


def _encoding_of(request: pb.PullRequest, kv_cache: torch.Tensor) -> Encoding:
    item = kv_cache.itemsize
    match request.encoding:
        case "" | "none":
            return Encoding()
        case "zstd":
            return Encoding("zstd", item)
        case "int8" if kv_cache.dtype == torch.bfloat16 and request.row_bytes >= item:
            return Encoding("int8", item, request.row_bytes)
    raise HandoverError(f"KV in {kv_cache.dtype} cannot be sent as {request.encoding}")


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

    def __init__(
        self,
        kv_cache: torch.Tensor,
        *,
        stall_s: float = 10.0,
        encoding: Encoding | None = None,
    ) -> None:
        """`encoding`: how pieces are asked for; whole by default."""
        self.kv_cache = kv_cache
        self._encoding = encoding or Encoding()
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
        pieces: Sequence[Pieces] | None = None,
    ) -> None:
        if self._is_closed:
            raise HandoverError("the KV transport is closed")
        num_local = self.kv_cache.shape[0]
        check_block_ids(remote_block_ids, None, local_block_ids, num_local, pieces is not None)
        if not local_block_ids:
            return
        request = pb.PullRequest(
            request_id=request_id,
            incarnation=peer.incarnation,
            block_ids=remote_block_ids,
            encoding=self._encoding.name,
            row_bytes=self._encoding.row_bytes,
        )
        spans = None
        if pieces is not None:
            check_pieces(pieces, len(local_block_ids), None, self._block_bytes)
            _ask_for_pieces(request, pieces)
            spans = [[(write, length) for _, write, length in kind] for kind in pieces]
        writer = Writer(self.kv_cache, runs(local_block_ids, self._block_bytes, spans))
        call = self._method(peer)(request)
        try:
            while (message := await self._next(call, peer)) is not None:
                writer.write(await self._data_of(message), peer.worker_id)
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

    async def _data_of(self, message: bytes) -> memoryview:
        if (data := data_of(message)) is not None:
            return data
        if (encoded := data_of(message, ENCODED_TAG)) is not None and self._encoding.name != "none":
            most = self._encoding.piece_bytes(PIECE_BYTES)
            return await asyncio.to_thread(self._encoding.decode, encoded, most)
        return memoryview(pb.KvPiece.FromString(message).data)

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
            f"/{_SERVICE}/Pull", request_serializer=pb.PullRequest.SerializeToString
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


def _ask_for_pieces(request: pb.PullRequest, pieces: Sequence[Pieces]) -> None:
    """Names each kind of pieces once; blocks of one plan have few."""
    kinds: dict[Pieces, int] = {}
    for kind in pieces:
        if kind not in kinds:
            kinds[kind] = len(kinds)
            request.spans.add(
                offsets=[read for read, _, _ in kind], lengths=[length for _, _, length in kind]
            )
        request.spans_of.append(kinds[kind])
