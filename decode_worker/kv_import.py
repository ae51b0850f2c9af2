"""The decode worker's side of a hand-over.

    attach to P                         the lease: P keeps the blocks as long as the stream lives
    <- admitted: P's block ids          P has its blocks and will run to the end; only now
    reserve blocks here (FIFO)          do we take ours, so that P and D cannot wait for each other
    <- ready: n blocks are final        pull them while P computes the next chunk
    <- commit: tokens, checksums        pull the rest, verify
    release at P -> pinned?             the fence: only a "yes" makes the KV ours
    start decoding

Until the fence has answered yes, every way out gives the reserved blocks back, and not before the
wire is quiet: a copy in flight must never land in somebody else's block.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from core.block_hash import token_digest
from core.errors import HandoverError, PdserveError
from core.types import FinishReason, GenerationRequest
from decode_worker.peers import PeerBook, PrefillPeer
from engine.grammar import Matcher
from kv_transfer.base import TransferInDoubt
from kv_transfer.checksum import verify
from rpc import codec
from rpc import worker_pb2 as pb
from rpc.status import error_from_rpc
from worker.outputs import OutputStream
from worker.runtime import WorkerRuntime, now

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RELEASE_SECONDS = 5.0


@dataclass(slots=True)
class ImportResult:
    """What a hand-over brought, or that there was nothing to hand over."""

    started: pb.DecodeStarted
    finish_reason: FinishReason | None = None


class _Finished(Exception):
    """P's first token was the last: there is nothing to hand over."""

    def __init__(self, reason: FinishReason | None) -> None:
        super().__init__(reason)
        self.reason = reason


class _Announced:
    """What P has announced so far. `changed` says that something is new, `ended` that nothing
    more will come, and why is in `error`."""

    def __init__(self) -> None:
        self.block_ids: list[int] | None = None
        self.num_ready = 0
        self.commit: pb.KvCommit | None = None
        self.error: PdserveError | _Finished | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()

    def apply(self, event: pb.KvEvent) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                self.block_ids = list(event.admitted.block_ids)
            case "ready":
                self.num_ready = event.ready.num_ready_blocks
            case "commit":
                self.commit = event.commit
            case "finished":
                self.end(_Finished(codec.finish_from_pb(event.finished.finish_reason)))
        self.changed.set()

    def end(self, error: PdserveError | _Finished) -> None:
        if self.error is None:
            self.error = error
        self.ended.set()
        self.changed.set()

    async def wait(self) -> None:
        """Returns when something is new since the caller looked (it must not have awaited in
        between); raises what went wrong at P or on the way."""
        self.changed.clear()
        if self.error is None:
            await self.changed.wait()
        if self.error is not None:
            raise self.error


class KVImport:
    """One hand-over. `run` returns when decoding may start, or raises having given all back."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        peers: PeerBook,
        request: GenerationRequest,
        source: pb.PeerAddress,
        outputs: OutputStream,
        matcher: Matcher | None = None,
    ) -> None:
        self._matcher = matcher
        self._runtime = runtime
        self._peers = peers
        self._request = request
        self._source = source
        self._outputs = outputs
        self._announced = _Announced()
        self._started = pb.DecodeStarted()

    async def run(self) -> ImportResult:
        """Raises UnavailableError and its kin; then nothing of the request is left here."""
        runtime, request_id = self._runtime, self._request.request_id
        try:
            peer = await self._peers.get(self._source)
            async with self._attached(peer):
                result = await self._receive(peer)
            runtime.transfers_ok += 1
            return result
        except _Finished as finished:
            runtime.abort(request_id)
            return ImportResult(self._started, finished.reason)
        except TransferInDoubt as error:
            runtime.transfers_failed += 1
            self._abort_when_quiet(error.quiet)
            raise
        except asyncio.CancelledError:
            runtime.abort(request_id)
            raise
        except BaseException:
            runtime.transfers_failed += 1
            runtime.abort(request_id)
            raise

    def _abort_when_quiet(self, quiet: asyncio.Event) -> None:
        """Quarantine: the blocks stay reserved until the last byte has landed."""
        request_id = self._request.request_id
        logger.warning("%s: a copy is in doubt, its blocks are quarantined", request_id)

        async def wait() -> None:
            await quiet.wait()
            self._runtime.abort(request_id)

        self._runtime.in_background(wait())

    @asynccontextmanager
    async def _attached(self, peer: PrefillPeer) -> AsyncIterator[None]:
        """The Attach stream, read in the background into `_announced`; its end ends the lease."""
        call = peer.kv.Attach(
            pb.AttachRequest(
                request_id=self._request.request_id,
                incarnation=self._source.incarnation,
                token_digest=token_digest(self._request.token_ids),
                compatibility=self._runtime.compatibility,
                decode_worker_id=self._runtime.settings.worker_id,
            )
        )
        reader = asyncio.create_task(self._read(call), name="attach")
        try:
            yield
        finally:
            call.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> None:
        try:
            async for event in call:
                self._announced.apply(event)
            self._announced.end(HandoverError(f"{self._source.worker_id} ended the lease"))
        except grpc.aio.AioRpcError as error:
            self._announced.end(error_from_rpc(error, self._source.worker_id))

    async def _receive(self, peer: PrefillPeer) -> ImportResult:
        announced = self._announced
        while announced.block_ids is None:
            await announced.wait()
        block_table, num_held = await self._reserve()
        if len(block_table) != len(announced.block_ids):
            raise HandoverError(
                f"{self._source.worker_id} has {len(announced.block_ids)} blocks for the prompt, "
                f"{len(block_table)} are needed"
            )
        pulled_seconds, next_block, committed_at = 0.0, num_held, None
        while True:
            num_ready, commit = announced.num_ready, announced.commit
            if commit is not None and committed_at is None:
                committed_at = now()
            if next_block < num_ready:
                pulling_since = now()
                await self._pull(peer, announced.block_ids, block_table, next_block, num_ready)
                pulled_seconds += now() - pulling_since
                next_block = num_ready
            elif commit is not None:
                break
            else:
                await announced.wait()
        await self._verify(commit, block_table, num_held)
        num_pulled = len(block_table) - num_held
        await self._release(peer, num_pulled)
        first_token = commit.first_token.id
        await self._runtime.run_on_engine(
            lambda e: e.start_decode(self._request.request_id, first_token)
        )
        started = self._started
        started.num_transferred_tokens = commit.num_tokens - started.num_cached_tokens
        started.kv_bytes = num_pulled * self._block_bytes
        started.kv_transfer_seconds = pulled_seconds
        started.kv_tail_seconds = now() - (committed_at or now())
        return ImportResult(started)

    async def _reserve(self) -> tuple[list[int], int]:
        """Waits for blocks here; the lease keeps P's alive meanwhile. Returns the block table and
        how many blocks of it this worker's own prefix cache holds already."""
        await self._runtime.run_on_engine(lambda e: e.add_remote(self._request, self._matcher))
        output = await self._unless_ended(self._outputs.next())
        assert output.admitted and output.block_table is not None
        self._started.num_cached_tokens = output.num_cached_tokens
        self._started.queue_seconds = output.queue_seconds
        num_held = output.num_cached_tokens // self._runtime.settings.engine.block_size
        return output.block_table, num_held

    async def _pull(
        self, peer: PrefillPeer, remote: list[int], local: list[int], start: int, end: int
    ) -> None:
        """Pulls the blocks at positions [start, end)."""
        await self._unless_ended(
            peer.transfer.pull(
                peer.peer, self._request.request_id, remote[start:end], local[start:end]
            )
        )
        self._runtime.transport_in_use = self._describe(peer)
        self._runtime.kv_bytes_received += (end - start) * self._block_bytes

    async def _unless_ended(self, work: Coroutine[None, None, T]) -> T:
        """Awaits `work`; the end of the lease, or of our own caller, cancels it. Never returns
        before `work` has ended: a pull ends when its wire is quiet."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._announced.ended.wait())
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled() and isinstance(task.exception(), TransferInDoubt):
                task.result()  # raised even when we are cancelled: the blocks need a quarantine
        if task.cancelled():
            raise self._announced.error or HandoverError("the pull was cancelled")
        return task.result()

    @property
    def _block_bytes(self) -> int:
        return int(self._runtime.info.kv_block_bytes)

    @staticmethod
    def _describe(peer: PrefillPeer) -> str:
        carrier = peer.transfer.carrier(peer.peer)
        return f"{peer.transfer.name} ({carrier})" if carrier else peer.transfer.name

    async def _verify(self, commit: pb.KvCommit, block_table: list[int], num_held: int) -> None:
        tokens = self._request.token_ids
        if commit.num_tokens != len(tokens) or commit.token_digest != token_digest(tokens):
            raise HandoverError("the commit record is for other tokens")
        if commit.block_checksums:
            expected = list(commit.block_checksums)[num_held:]
            await asyncio.to_thread(
                verify, self._runtime.engine.kv_cache, block_table[num_held:], expected
            )

    async def _release(self, peer: PrefillPeer, num_pulled: int) -> None:
        try:
            response: pb.ReleaseResponse = await peer.kv.Release(
                pb.ReleaseRequest(
                    request_id=self._request.request_id,
                    incarnation=self._source.incarnation,
                    bytes_read=num_pulled * self._block_bytes,
                    transport=self._describe(peer),
                ),
                timeout=_RELEASE_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._source.worker_id) from error
        if not response.pinned:
            raise HandoverError(f"{self._source.worker_id} had given the blocks away")
