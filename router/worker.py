"""One worker as this router sees it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Protocol

import grpc

from core.errors import UnavailableError
from core.types import Role
from router.breaker import Breaker
from router.policy import Load
from router.prefix_index import PrefixIndex
from rpc import codec, worker_pb2, worker_pb2_grpc
from rpc.channel import make_channel
from rpc.cluster_pb2 import WorkerEntry

logger = logging.getLogger(__name__)

_GET_INFO_TIMEOUT_S = 5.0
_STATUS_SILENCE_S = 10.0  # statuses come every second
_STALL_S = 60.0  # no engine step for so long, with work to do: place nothing there
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_ticks = count(1)


class Passenger(Protocol):
    """Something that runs on a worker and must hear of its loss."""

    def lose(self, worker: "Worker", error: UnavailableError) -> None: ...


class Worker:
    """One incarnation: its channel, what it says about itself, and what this router has there.

    Owns the channel and the task that follows the worker's status. It is `reachable` from the
    first status until a call or the status stream breaks, and again from the next status on.
    """

    def __init__(self, entry: WorkerEntry, on_change: Callable[[], None]) -> None:
        self.entry = entry
        self.info: worker_pb2.WorkerInfo | None = None
        self.status: worker_pb2.WorkerStatus | None = None
        self.reachable = False
        self.retired = False
        self.breaker = Breaker()
        self.prefixes = PrefixIndex(0)
        self._on_change = on_change
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
        self._task = asyncio.create_task(self._follow(), name=f"follow {entry.id}")

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def incarnation(self) -> str:
        return self.entry.incarnation

    @property
    def role(self) -> Role:
        return codec.role_from_pb(self.entry.role)

    @property
    def num_passengers(self) -> int:
        return len(self._passengers)

    @property
    def is_ready(self) -> bool:
        """Can take a request now."""
        return (
            not self.retired
            and self.reachable
            and self.info is not None
            and self.status is not None
            and self.entry.state == worker_pb2.WORKER_STATE_READY
            and self.status.state == worker_pb2.WORKER_STATE_READY
            and self.status.seconds_since_progress < _STALL_S
        )

    def peer_address(self) -> worker_pb2.PeerAddress:
        return worker_pb2.PeerAddress(
            worker_id=self.id, address=self.entry.address, incarnation=self.incarnation
        )

    def load(self, hashes: Sequence[bytes]) -> Load:
        """The last status corrected by what this router sent and has not seen reported. Only
        called on a ready worker."""
        assert self.info is not None and self.status is not None
        status, blocks = self.status, self.status.kv_blocks
        busy = status.requests_running + status.requests_waiting + self._unreported_requests
        used = max(blocks.total - blocks.free - blocks.cached, min(self._blocks, blocks.total))
        queued = status.waiting_prefill_tokens + self._unreported_tokens
        return Load(
            queued_tokens=max(queued, self._queued_tokens),
            num_requests=max(busy, len(self._passengers)),
            free_blocks=blocks.total - used,
            total_blocks=blocks.total,
            max_num_seqs=self.info.max_num_seqs,
            cached_tokens=self.prefixes.match(hashes) * self.info.block_size,
            last_chosen=self._last_chosen,
        )

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
        for passenger in tuple(self._passengers):
            passenger.lose(self, UnavailableError(f"{self.id}: {reason}"))
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._channel.close()

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
                        status = await asyncio.wait_for(statuses.read(), _STATUS_SILENCE_S)
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
        self.prefixes = PrefixIndex(info.num_kv_blocks)

    def _report(self, status: worker_pb2.WorkerStatus) -> None:
        was_ready = self.is_ready
        self.status = status
        self.reachable = True
        self._num_statuses += 1
        self._unreported_tokens = 0
        self._unreported_requests = 0
        if self.is_ready != was_ready:
            logger.info("%s is %s", self.id, "ready" if self.is_ready else "not ready")
            self._on_change()
