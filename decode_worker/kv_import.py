"""Drives the decode worker's side of a hand-over: `kv_transfer.receive` decides, this acts.

attach to P                         the lease: P keeps the blocks as long as the stream lives
<- admitted: P's block ids          P has its blocks and will run to the end; only now
reserve blocks here (FIFO)          do we take ours, so that P and D cannot wait for each other
<- ready: n blocks are final        pull them while P computes the next chunk
<- commit: tokens, checksums        pull the rest, verify
release at P -> pinned?             the fence: only a "yes" makes the KV ours
start decoding
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from core.block_hash import token_digest
from core.errors import CancelledByPeerError, HandoverError
from core.types import FinishReason, GenerationRequest
from decode_worker.peers import PeerBook, PrefillPeer
from engine.grammar import Matcher
from kv_transfer.base import TransferInDoubt, settled
from kv_transfer.checksum import compare
from kv_transfer.events import Admitted, Commit, Event, Finished, Ready
from kv_transfer.layout import CopyPlan
from kv_transfer.rank import Pulled, PullOrder
from kv_transfer.receive import Receive, ReceiveState
from rpc import codec
from rpc import worker_pb2 as pb
from rpc.status import error_from_rpc
from worker.outputs import OutputStream
from worker.runtime import WorkerRuntime, now

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 5.0
_MAX_PULLS = 256  # that are reported one by one


@dataclass(slots=True)
class ImportResult:
    """What a hand-over brought, or that there was nothing to hand over."""

    started: pb.DecodeStarted
    finish_reason: FinishReason | None = None


class KVImport:
    """One hand-over. `run` returns when decoding may start, or raises; then all is given back, or
    will be as soon as the wire is quiet."""

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
        self._started = pb.DecodeStarted()
        self._arrived = now()
        self._committed_at: float | None = None
        self._changed = asyncio.Event()
        self._transport = ""  # that carried the last pull
        self._first_whole_block = 0  # those before it miss layers that decoding does not look at
        ranks = range(runtime.kv_ranks.shape.tensor_parallel_size)
        self._checksums: list[list[int]] = [[] for _ in ranks]  # of what each has pulled
        tokens = request.token_ids
        self._machine = Receive(
            num_tokens=len(tokens),
            token_digest=token_digest(tokens),
            block_size=runtime.settings.engine.block_size,
            give_back=lambda: runtime.abort(request.request_id),
        )

    async def run(self) -> ImportResult:
        """Raises UnavailableError and its kin."""
        runtime, machine = self._runtime, self._machine
        try:
            await self._drive()
            if machine.state is ReceiveState.RELEASED:
                await self._start_decode()
                runtime.transfers_ok += 1
                return ImportResult(self._started)
        except BaseException:
            if machine.state is ReceiveState.RELEASED:  # the blocks are the sequence's already
                runtime.abort(self._request.request_id)
            raise
        if machine.is_finished:
            return ImportResult(self._started, machine.finish_reason)
        runtime.transfers_failed += 1
        raise machine.error or HandoverError("the hand-over ended without a cause")

    async def _drive(self) -> None:
        """Until the outcome is known. Only a cancellation is raised; it decides, too."""
        machine = self._machine
        try:
            peer = await self._peers.get(self._source)
            async with self._attached(peer):
                while not machine.is_decided:
                    await self._advance(peer)
        except asyncio.CancelledError:
            machine.fail(CancelledByPeerError("the decode was cancelled"))
            raise
        except Exception as error:
            machine.fail(error)

    # ------------------------------------------------------------ what P says

    @asynccontextmanager
    async def _attached(self, peer: PrefillPeer) -> AsyncIterator[None]:
        """The Attach stream, read in the background; its end ends the lease."""
        call = peer.kv.Attach(
            pb.AttachRequest(
                request_id=self._request.request_id,
                incarnation=self._source.incarnation,
                token_digest=self._machine.token_digest,
                compatibility=self._runtime.compatibility,
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
        who = self._source.worker_id
        try:
            async for message in call:
                if message.HasField("commit"):
                    self._committed_at = now()
                if (event := _event(message)) is not None:
                    self._machine.announced(event)
                    self._changed.set()
            self._machine.lost(HandoverError(f"{who} ended the lease"))
        except grpc.aio.AioRpcError as error:
            self._machine.lost(error_from_rpc(error, who))
        self._changed.set()

    # ------------------------------------------------------------ what we do about it

    async def _advance(self, peer: PrefillPeer) -> None:
        """The work of the machine's state, or waiting for P if it has none."""
        machine = self._machine
        match state := machine.state:
            case ReceiveState.RESERVING:
                await self._do(state, self._reserve())
            case ReceiveState.RESERVED if machine.next_pull is not None:
                machine.begin_pull()
                await self._do(machine.state, self._pull(peer))
            case ReceiveState.COMMITTED:
                await self._do(state, self._verify(peer))
            case ReceiveState.RELEASING:
                await self._do(state, self._release(peer))
            case _:
                await self._changed.wait()
                self._changed.clear()

    async def _do(self, state: ReceiveState, work: Coroutine[Any, Any, None]) -> None:
        """Does the work of `state` until it is done, or cancels it when the machine leaves the
        state. Never returns before the work has ended: a pull ends when its wire is quiet."""
        task = asyncio.ensure_future(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done() and self._machine.state is state:
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait((task, changed), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancelled = error
                self._machine.fail(CancelledByPeerError("the decode was cancelled"))
            finally:
                changed.cancel()
        if not task.done():
            task.cancel()
            cancelled = await settled(task, task.cancel) or cancelled
        self._report(task, is_pull=state is ReceiveState.PULLING)
        if cancelled is not None:
            raise cancelled

    def _report(self, task: "asyncio.Future[None]", is_pull: bool) -> None:
        """Tells the machine how the work ended; what it brought, it has told already."""
        error = HandoverError("it was cancelled") if task.cancelled() else task.exception()
        if error is None:
            return
        assert isinstance(error, Exception)
        if not is_pull:
            self._machine.fail(error)
        elif isinstance(error, TransferInDoubt):
            self._machine.in_doubt(error)
            self._watch_quarantine(error.quiet)
        else:
            self._machine.pull_ended(error)

    def _watch_quarantine(self, quiet: asyncio.Event) -> None:
        """The blocks stay reserved until the last byte has landed."""
        request_id = self._request.request_id
        logger.warning("%s: a copy is in doubt, its blocks are quarantined", request_id)

        async def wait() -> None:
            await quiet.wait()
            self._machine.quiet()

        self._runtime.in_background(wait())

    async def _reserve(self) -> None:
        """Waits for blocks here; the lease keeps P's alive meanwhile."""
        if self._machine.state is not ReceiveState.RESERVING:
            return  # lost before this task ran: what was given back must not be asked for now
        started = self._started
        started.queue_offset_seconds = now() - self._arrived
        await self._runtime.run_on_engine(lambda e: e.add_remote(self._request, self._matcher))
        output = await self._outputs.next()
        assert output.admitted and output.block_table is not None
        started.num_cached_tokens = output.num_cached_tokens
        started.queue_seconds = output.queue_seconds
        num_held = output.num_cached_tokens // self._runtime.settings.engine.block_size
        self._machine.reserved(tuple(output.block_table), num_held)

    async def _pull(self, peer: PrefillPeer) -> None:
        machine, runtime, started = self._machine, self._runtime, self._started
        since = now()
        pulled = await runtime.kv_ranks.pull(peer.source, self._order())
        seconds = now() - since
        num_bytes = sum(part.num_bytes for part in pulled)
        runtime.kv_bytes_received += num_bytes
        runtime.links.note(self._source.incarnation, num_bytes, seconds)
        started.kv_bytes += num_bytes
        started.kv_transfer_seconds += seconds
        if len(started.pulls) < _MAX_PULLS:
            offset = since - self._arrived
            started.pulls.add(bytes=num_bytes, offset_seconds=offset, seconds=seconds)
        for sums, part in zip(self._checksums, pulled, strict=True):
            sums += part.checksums
        self._note_carriers(pulled)
        machine.pulled()

    def _order(self) -> PullOrder:
        """The pull that the machine has begun. Checksums are made with it, while P computes on: at
        the commit only the last chunk's are left to do."""
        machine = self._machine
        start, stop = machine.pulling
        begin = max(start * machine.remote_block_size, machine.num_held_tokens)
        end = min(stop * machine.remote_block_size, machine.num_tokens)
        size = machine.block_size
        return PullOrder(
            request_id=self._request.request_id,
            num_tokens=machine.num_tokens,
            first_token=machine.num_held_tokens,
            start=start,
            stop=stop,
            remote_ids=machine.remote_ids[start:stop],
            local_ids=machine.local_ids[begin // size : -(-end // size)],
            wants_checksums=self._runtime.settings.config.kv_transfer.checksum,
        )

    def _note_carriers(self, pulled: list[Pulled]) -> None:
        runtime = self._runtime
        for rank, part in enumerate(pulled):
            for peer_id, transport, carrier in part.carriers:
                who = f"{peer_id} to rank {rank}" if rank else peer_id
                described = runtime.carriers.note(who, transport, carrier)
                if rank == 0:
                    runtime.transport_in_use = self._transport = described

    async def _verify(self, peer: PrefillPeer) -> None:
        machine, shape = self._machine, self._runtime.kv_ranks.shape
        assert machine.commit is not None
        sums, start = machine.commit.checksums, 0
        is_checked = bool(sums) and self._runtime.settings.config.kv_transfer.checksum
        for rank, found in enumerate(self._checksums):
            plan = CopyPlan(peer.source.shape, shape, rank, machine.num_tokens)
            self._first_whole_block = plan.first_whole_position
            if is_checked:
                stop = start + len(plan.copies(0, machine.num_blocks))
                # What was held already is in front.
                num_pulled = len(plan.copies(0, machine.num_blocks, machine.num_held_tokens))
                compare(found, sums[stop - num_pulled : stop])
                start = stop
        if is_checked and start != len(sums):
            raise HandoverError(f"{len(sums)} checksums for {start} copies")
        machine.verified()

    async def _release(self, peer: PrefillPeer) -> None:
        try:
            response: pb.ReleaseResponse = await peer.kv.Release(
                pb.ReleaseRequest(
                    request_id=self._request.request_id,
                    incarnation=self._source.incarnation,
                    bytes_read=self._started.kv_bytes,
                    transport=self._transport
                    or self._runtime.kv_rank.transport_from(peer.source).name,
                ),
                timeout=_RELEASE_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._source.worker_id) from error
        self._machine.fenced(response.pinned)

    async def _start_decode(self) -> None:
        commit, started = self._machine.commit, self._started
        assert commit is not None
        request_id = self._request.request_id
        first_whole = self._first_whole_block
        await self._runtime.run_on_engine(
            lambda e: e.start_decode(request_id, commit.first_token, first_whole)
        )
        started.num_transferred_tokens = commit.num_tokens - started.num_cached_tokens
        started.kv_tail_seconds = now() - (self._committed_at or now())
        started.hand_over_seconds = now() - self._arrived


def _event(message: pb.KvEvent) -> Event | None:
    """None for a kind of event that this version does not know."""
    match message.WhichOneof("event"):
        case "admitted":
            return Admitted(tuple(message.admitted.block_ids), message.admitted.block_size)
        case "ready":
            return Ready(message.ready.num_ready_blocks)
        case "commit":
            commit = message.commit
            first_token, logprobs = codec.token_from_pb(commit.first_token)
            return Commit(
                num_tokens=commit.num_tokens,
                token_digest=commit.token_digest,
                checksums=tuple(commit.block_checksums),
                first_token=first_token,
                first_logprobs=logprobs,
            )
        case "finished":
            return Finished(codec.finish_from_pb(message.finished.finish_reason))
    return None
