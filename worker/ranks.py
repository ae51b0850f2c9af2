"""What rank 0 of a tensor-parallel worker has of the other ranks beside the steps: that they live,
and where their servers are."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from core.errors import RankLostError, StalePeerError
from core.worker_settings import WorkerSettings
from engine.parallel import RankGroup
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.channel import make_channel
from worker.engine_setup import choose_device

logger = logging.getLogger(__name__)

INCARNATION = "incarnation"  # of the worker, as rank 0 publishes it
_ATTEND_S = 30.0


def address_of(rank: int) -> str:
    """The name under which a rank publishes the address of its server."""
    return f"address of rank {rank}"


def join(settings: WorkerSettings) -> RankGroup:
    """Meets the other ranks; blocks until all are there. Raises RankLostError."""
    return RankGroup(
        settings.rank,
        settings.num_ranks,
        settings.rendezvous,
        settings.host,
        choose_device(settings.engine),
        settings.rendezvous_fd,
    )


def check_incarnation(given: str, own: str) -> None:
    if given != own:
        raise StalePeerError(f"incarnation {given or '(none)'} is gone")


class Followers:
    """Rank 0's calls to the other ranks, each open as long as both processes live.

    `addresses[r]` is where rank r serves; `addresses[0]` is "" until the worker itself serves.
    The first call that ends before `close` is reported to `on_lost`, once, on the loop."""

    def __init__(self, worker_id: str, on_lost: Callable[[RankLostError], None]) -> None:
        self.addresses: list[str] = [""]
        self._worker_id = worker_id
        self._on_lost = on_lost
        self._is_ending = False
        self._channels: list[Any] = []
        self._watches: list[asyncio.Task[None]] = []

    async def attend(self, addresses: Sequence[str], incarnation: str) -> None:
        """Opens the calls to ranks 1, 2, ... Raises RankLostError if one does not answer."""
        for rank, address in enumerate(addresses, start=1):
            channel = make_channel(address)
            self._channels.append(channel)
            stub = worker_pb2_grpc.RankServiceStub(channel)
            call = stub.Attend(pb.AttendRequest(incarnation=incarnation))
            try:
                async with asyncio.timeout(_ATTEND_S):
                    status = await call.read()
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                raise RankLostError(f"rank {rank} of {self._worker_id} does not answer") from error
            if status is grpc.aio.EOF or status.rank != rank:
                raise RankLostError(f"rank {rank} of {self._worker_id} is not at {address}")
            logger.info("rank %d is process %d at %s", rank, status.pid, address)
            self.addresses.append(address)
            self._watches.append(asyncio.create_task(self._watch(rank, call)))

    async def _watch(self, rank: int, call: Any) -> None:
        reason = "its process has ended"
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        if not self._is_ending:
            self._on_lost(RankLostError(f"rank {rank} of {self._worker_id} is gone: {reason}"))

    def expect_end(self) -> None:
        """The others are about to be told to stop: from now on none is lost."""
        self._is_ending = True

    async def close(self) -> None:
        """Lets the others go: to them it is the end of this process. Idempotent."""
        self._is_ending = True
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()
