"""A process of a tensor-parallel worker that is not its first: rank 1, 2, ..."""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable

import grpc
import torch

from core.errors import RankLostError
from core.model_files import resolve_model
from core.types import Role
from core.worker_settings import WorkerSettings
from engine.model.decoder import Decoder
from engine.parallel import RankGroup, run_follower
from kv_transfer.base import KVTransfer
from kv_transfer.grpc_transport import add_kv_service
from kv_transfer.rank import KVRank
from kv_transfer.select import make_transports
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.channel import bind, make_server
from rpc.status import translated_errors
from worker.engine_setup import build_follower, kv_shape
from worker.kv_ranks import FollowerKvService, KvRankService
from worker.ranks import INCARNATION, address_of, check_incarnation, join

logger = logging.getLogger(__name__)

_STOP_S = 8.0
_LAST_STEP_S = 0.5  # that rank 0 may have sent before it closed its call: to stop in order


class FollowerWorker:
    """Owns its part of the weights and of every KV block, the thread that runs what rank 0
    announces, and a server on a free port beside it for whoever moves its blocks.

    It lives as long as rank 0 does: `failed` resolves when that is gone, or when the thread has
    failed; the process must then exit. `stop` is called at the same time as rank 0's."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.server = make_server()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.kv_cache: torch.Tensor  # after `load`: [num_blocks, ...], this rank's part of each
        self.incarnation = ""  # after `load`: the whole worker's
        self._loop = asyncio.get_running_loop()
        self._has_stopped = False  # in order, as rank 0 said
        self._thread: threading.Thread | None = None
        self._transports: dict[str, KVTransfer] = {}
        self._info = pb.WorkerInfo()

    @property
    def info(self) -> pb.WorkerInfo:
        return self._info

    @property
    def num_requests(self) -> int:
        return 0

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ModelError, and RankLostError if the others did not get as far."""
        await self.load(progress)
        self._hand_over()
        await self.serve()

    async def load(self, progress: Callable[[str], None]) -> None:
        """Meets the other ranks, loads this one's part and allocates its KV blocks."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        self._ranks = await asyncio.to_thread(join, settings)
        self.incarnation = await asyncio.to_thread(self._ranks.lookup, INCARNATION)
        files = await asyncio.to_thread(resolve_model, settings.config.model, progress=progress)
        self._model, self.kv_cache = await asyncio.to_thread(
            build_follower, files, settings, self._ranks, progress
        )

    def _hand_over(self) -> None:
        """Serves this rank's part of hand-overs. A colocated worker has none."""
        settings = self.settings
        if settings.role is Role.COLOCATED:
            return
        shape = kv_shape(self._model, settings)
        self._transports = make_transports(
            settings.config.kv_transfer.transport,
            self.kv_cache,
            worker_id=f"{settings.worker_id}/{self.rank}",
            incarnation=self.incarnation,
            compression=settings.config.kv_transfer.compression,
            row_bytes=shape.row_bytes,
        )
        rank = KVRank(self.kv_cache, shape, self._transports, self.rank)
        add_kv_service(FollowerKvService(rank, self.incarnation), self.server)
        worker_pb2_grpc.add_KvRankServiceServicer_to_server(
            KvRankService(rank, self.incarnation), self.server
        )

    async def serve(self) -> None:
        """Binds the server, with the services that were added to it, tells rank 0 its address
        and begins to follow."""
        settings, ranks = self.settings, self._ranks
        worker_pb2_grpc.add_RankServiceServicer_to_server(_RankService(self), self.server)
        address = f"{settings.host}:{bind(self.server, f'{settings.host}:0')}"
        await self.server.start()
        self._info = pb.WorkerInfo(
            id=f"{settings.worker_id} rank {self.rank}",
            role=codec.role_to_pb(settings.role),
            host=socket.gethostname(),
            pid=os.getpid(),
            address=address,
            incarnation=self.incarnation,
        )
        await asyncio.to_thread(ranks.publish, address_of(self.rank), address)
        await asyncio.to_thread(ranks.barrier)
        self._thread = threading.Thread(
            target=self._follow, args=(self._model, ranks), name="rank", daemon=True
        )
        self._thread.start()
        logger.info("%s follows at %s", self._info.id, address)

    async def drain(self, grace_s: float = 0.0) -> bool:
        return True

    async def stop(self, grace_s: float = 0.0) -> None:
        """Waits for rank 0's word, which comes when that has stopped with the same grace;
        without it the process ends all the same."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, grace_s + _STOP_S)
        self._has_stopped = True
        await self.server.stop(0)
        for transport in self._transports.values():
            await transport.close()

    def leader_left(self) -> None:
        """Rank 0 has closed its call, or died."""
        self._loop.call_later(_LAST_STEP_S, self._leader_left)

    def _leader_left(self) -> None:
        if not self._has_stopped:
            self._fail(RankLostError(f"{self._info.id}: rank 0 is gone"))

    def _follow(self, model: Decoder, ranks: RankGroup) -> None:  # a thread of its own
        try:
            run_follower(model, ranks)
            self._has_stopped = True
        except BaseException as error:
            logger.exception("%s failed", self._info.id)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


class _RankService(worker_pb2_grpc.RankServiceServicer):
    def __init__(self, follower: FollowerWorker) -> None:
        self._follower = follower

    async def Attend(
        self, request: pb.AttendRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RankStatus]:
        async with translated_errors(context):
            check_incarnation(request.incarnation, self._follower.incarnation)
        yield pb.RankStatus(rank=self._follower.rank, pid=os.getpid())
        try:
            await asyncio.Event().wait()
        finally:
            self._follower.leader_left()
