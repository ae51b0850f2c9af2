"""One worker as this router sees it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Protocol

import grpc

from core.errors import UnavailableError
from core.types import Role
from router.placement.breaker import Breaker
from router.placement.policy import Load, Speeds, has_room
from router.placement.prefix_index import Holdings, PrefixIndex
from router.placement.step_stream import StepReader
from rpc import codec, worker_pb2, worker_pb2_grpc
from rpc.channel import make_channel
from rpc.cluster_pb2 import WorkerEntry

logger = logging.getLogger(__name__)

_GET_INFO_TIMEOUT_S = 5.0
_STATUS_SILENCE_S = 10.0  # statuses come every second
_STALL_S = 60.0  # no engine step for so long, with work to do: it is given up until it goes on
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
# A line through few measurements may be flat; a bigger batch is never free.
_LEAST_SLOPE = 0.01
# Work that is sent ahead of what a worker does: enough that it never runs dry between two
# statuses, little enough that who comes next is still decided here.
_ticks = count(1)
Compatibility = tuple[tuple[str, str], ...]  # names and values, sorted


class Passenger(Protocol):
    """Something that runs on a worker and must hear of its loss."""

    def lose(self, worker: "Worker", error: UnavailableError) -> None: ...


class Worker:
    """One incarnation: its channel, what it says about itself, and what this router has there.

    Owns the channel, the tasks that follow the worker's status, its KV blocks and its steps, and
    what the index has of it. It is `reachable` from the first status until a call or the status
    stream breaks, and again from the next status on.
    """

    def __init__(
        self,
        entry: WorkerEntry,
        index: PrefixIndex,
        on_change: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        """`on_change`: after a change of what can be placed here. `on_room`: whenever there may be
        room for another request."""
        self.entry = entry
        self.id: str = entry.id
        self.incarnation: str = entry.incarnation
        self.role: Role = codec.role_from_pb(entry.role)
        self.info: worker_pb2.WorkerInfo | None = None
        self.status: worker_pb2.WorkerStatus | None = None
        self.reachable = False
        self.retired = False
        self.breaker = Breaker()
        self.compatibility: Compatibility = ()
        self.holdings: Holdings | None = None  # from its GetInfo to the end
        # What it has measured of itself; None or missing: nothing yet.
        self.prefill_speed: float | None = None  # tokens/s
        self.decode_line: tuple[float, float] | None = None  # see policy.Speeds
        self.links: dict[str, float] = {}  # bytes/s from prefill workers, by incarnation
        self.link_speed: float | None = None  # their mean
        self._index = index
        self._on_change = on_change
        self._on_room = on_room
        self._identity = blake2b(entry.id.encode(), digest_size=8).digest()
        self._is_willing = False  # by its own last word
        # Of the last status, as plain numbers: a placement reads them for every worker.
        self._speeds: Speeds | None = None  # once all are measured
        self._token_bytes = 0.0
        self._busy = self._queued = self._total_blocks = self._used_blocks = 0
        self._block_size = self._max_num_seqs = self._step_tokens = 1
        self._passengers: set[Passenger] = set()
        self._queued_tokens = 0  # of this router's prefills that have no first token yet
        self._blocks = 0  # that this router's requests are going to need
        # Sent since the last status and not ended, so not in it.
        self._unreported_tokens = 0
        self._unreported_requests = 0
        self._num_statuses = 0
        self._last_chosen = 0
        self._channel = make_channel(entry.address)
        self._service = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.prefill = worker_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = worker_pb2_grpc.DecodeServiceStub(self._channel)
        self.steps = StepReader(entry.id, entry.incarnation)
        self._tasks = [asyncio.create_task(self._follow(), name=f"follow {entry.id}")]

    @property
    def num_passengers(self) -> int:
        return len(self._passengers)

    @property
    def is_ready(self) -> bool:
        """Can take a request now."""
        return (
            self._is_willing
            and self.reachable
            and not self.retired
            and self.entry.state == worker_pb2.WORKER_STATE_READY
        )

    def peer_address(self) -> worker_pb2.PeerAddress:
        return worker_pb2.PeerAddress(
            worker_id=self.id, address=self.entry.address, incarnation=self.incarnation
        )

    def load(self, cached_blocks: int, typical: Speeds) -> Load:
        """The last status corrected by what this router sent and has not seen reported. `typical`
        stands in for what the worker has not measured. Only called on a ready worker."""
        speeds = self._speeds
        if speeds is None:
            line = self.decode_line or typical[1:]
            speeds = Speeds(self.prefill_speed or typical.prefill, *line)
        total = self._total_blocks
        return Load(
            self._num_queued_tokens,
            self._num_requests,
            max(0, total - max(self._used_blocks, self._blocks)),
            total,
            self._max_num_seqs,
            cached_blocks * self._block_size,
            self._last_chosen,
            speeds,
            self._step_tokens,
            self._token_bytes,
            self._identity,
        )

    @property
    def _num_queued_tokens(self) -> int:
        reported = self._queued + self._unreported_tokens
        return reported if reported > self._queued_tokens else self._queued_tokens

    @property
    def _num_requests(self) -> int:
        return max(self._busy + self._unreported_requests, len(self._passengers))

    def has_room(self, typical: Speeds) -> bool:
        """Whether another request would begin here soon. An idle worker takes anything."""
        role = self.role
        return has_room(self.load(0, typical), role is not Role.DECODE, role is not Role.PREFILL)

    @contextmanager
    def carrying(self, passenger: Passenger, num_blocks: int) -> Iterator[None]:
        """Counts `passenger` as this worker's for as long as the body runs."""
        self._last_chosen = next(_ticks)
        sent_at = self._num_statuses
        self._unreported_requests += 1
        self._passengers.add(passenger)
        self._blocks += num_blocks
        self.breaker.sent()
        try:
            yield
        finally:
            self._passengers.discard(passenger)
            self._blocks -= num_blocks
            if sent_at == self._num_statuses:
                self._unreported_requests -= 1
            self._on_room()

    @contextmanager
    def prefilling(self, num_tokens: int) -> Iterator[None]:
        """Counts `num_tokens` as queued here for as long as the body runs."""
        sent_at = self._num_statuses
        self._queued_tokens += num_tokens
        self._unreported_tokens += num_tokens
        try:
            yield
        finally:
            self._queued_tokens -= num_tokens
            if sent_at == self._num_statuses:
                self._unreported_tokens -= num_tokens
            self._on_room()

    @contextmanager
    def expecting(self, names: Sequence[int]) -> Iterator[None]:
        """The worker is going to hold these KV blocks, if all goes well, while the body runs."""
        if self.holdings is None:
            yield
            return
        with self.holdings.expecting(names):
            yield

    def suspect(self) -> None:
        """A call could not reach it: nothing is placed here until its next status."""
        if self.reachable:
            logger.warning("%s does not answer; not used until it does", self.id)
            self.reachable = False
            self._on_change()

    def retire(self) -> None:
        """Not in the cluster's view any more. Running requests may end here."""
        self.retired = True

    async def close(self, reason: str) -> None:
        """The incarnation is gone: everything on it fails now instead of when TCP notices."""
        self.retired = True
        self.reachable = False
        self._lose_all(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.holdings is not None:
            self.holdings.close()
        await self._channel.close()

    def _lose_all(self, reason: str) -> None:
        for passenger in tuple(self._passengers):
            passenger.lose(self, UnavailableError(f"{self.id}: {reason}"))

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                if self.info is None:
                    self._learn(await self._service.GetInfo(
                        worker_pb2.GetInfoRequest(), timeout=_GET_INFO_TIMEOUT_S
                    ))  # fmt: skip
                statuses = self._service.WatchStatus(worker_pb2.WatchStatusRequest())
                try:
                    while True:
                        async with asyncio.timeout(_STATUS_SILENCE_S):
                            status = await statuses.read()
                        if status is grpc.aio.EOF:
                            break
                        failures = 0
                        self._report(status)
                finally:
                    statuses.cancel()
                reason = "its status stream ended"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except (TimeoutError, UnavailableError) as error:
                reason = str(error) or "no status"
            if self.reachable or failures == 0:
                logger.warning("%s is unreachable: %s", self.id, reason)
            self.reachable = False
            self._on_change()
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    def _learn(self, info: worker_pb2.WorkerInfo) -> None:
        if info.incarnation != self.incarnation:
            raise UnavailableError(f"another incarnation answers at {self.entry.address}")
        self.info = info
        self.compatibility = tuple(sorted(info.compatibility.items()))
        self._block_size = max(info.block_size, 1)
        self._token_bytes = info.kv_block_bytes / self._block_size
        self._max_num_seqs = max(info.max_num_seqs, 1)
        self._step_tokens = info.max_batched_tokens or Load._field_defaults["step_tokens"]
        if self.role is not Role.PREFILL and info.steps_address:
            steps = self.steps.follow(info.steps_address)
            self._tasks.append(asyncio.create_task(steps, name=f"steps of {self.id}"))
        self.holdings = self._index.open(info.num_kv_blocks if info.prefix_caching else 0)
        if info.prefix_caching:
            work = self._follow_blocks(self.holdings)
            self._tasks.append(asyncio.create_task(work, name=f"follow blocks of {self.id}"))

    def _report(self, status: worker_pb2.WorkerStatus) -> None:
        was_ready = self.is_ready
        self.status = status
        self.reachable = True
        self._is_willing = (
            status.state == worker_pb2.WORKER_STATE_READY
            and status.seconds_since_progress < _STALL_S
        )
        self._num_statuses += 1
        self._unreported_tokens = 0
        self._unreported_requests = 0
        self._note(status)
        if status.seconds_since_progress >= _STALL_S:
            self._lose_all(f"no progress for {status.seconds_since_progress:.0f} s")
        if self.is_ready != was_ready:
            logger.info("%s is %s", self.id, "ready" if self.is_ready else "not ready")
            self._on_change()
        self._on_room()

    def _note(self, status: worker_pb2.WorkerStatus) -> None:
        blocks = status.kv_blocks
        self._total_blocks = blocks.total
        self._used_blocks = blocks.total - blocks.free - blocks.cached
        self._busy = status.requests_running + status.requests_waiting
        self._queued = status.waiting_prefill_tokens
        self.prefill_speed = status.prefill_tokens_per_second or None
        if step_s := status.decode_step_seconds + status.decode_sequence_seconds:
            slope = max(status.decode_sequence_seconds, _LEAST_SLOPE * step_s)
            self.decode_line = (status.decode_step_seconds, slope)
        if self.prefill_speed is not None and self.decode_line is not None:
            self._speeds = Speeds(self.prefill_speed, *self.decode_line)
        self.links = {link.peer_incarnation: link.bytes_per_second for link in status.links}
        self.link_speed = sum(self.links.values()) / len(self.links) if self.links else None

    async def _follow_blocks(self, holdings: Holdings) -> None:
        """Keeps the index in step with the worker's prefix cache. What was heard is forgotten when
        the stream ends, since changes go unheard from then on."""
        failures = 0
        while True:
            events = self._service.WatchKvBlocks(
                worker_pb2.WatchKvBlocksRequest(incarnation=self.incarnation)
            )
            try:
                due = 1
                while (event := await events.read()) is not grpc.aio.EOF:
                    if event.incarnation != self.incarnation or event.sequence != due:
                        raise UnavailableError(f"KV event {event.sequence} came, {due} was due")
                    due += 1
                    failures = 0
                    holdings.apply(event)
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except UnavailableError as error:
                reason = error.message
            finally:
                events.cancel()
                holdings.forget()
            if failures == 0:
                logger.warning("the KV events of %s are lost: %s", self.id, reason)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1
