"""One engine, its KV transports and its gRPC server in one process.

`PrefillWorker` and `DecodeWorker` each own one `WorkerRuntime` and add their services to it. The
engine steps in a thread of its own; everything here runs on one asyncio loop, so probes and peers
are answered while a long prefill runs.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from core.errors import (
    EngineError,
    OverloadedError,
    PdserveError,
    StalePeerError,
    UnavailableError,
)
from core.host import available_cpus
from core.model_files import ModelFiles, resolve_model
from core.types import GenerationRequest, KVBlockCounts, Role, WorkerState
from core.worker_settings import WorkerSettings
from engine import native
from engine.engine import Engine
from engine.grammar import GrammarCompiler, Matcher
from engine.loop import EngineLoop
from engine.parallel import RankGroup, TensorParallel
from engine.prompt_sign import host_sign
from engine.types import EngineStats, SequenceOutput
from kv_transfer.base import KVTransfer
from kv_transfer.carrier import CarrierWatch
from kv_transfer.compatibility import describe
from kv_transfer.rank import KVRank, KVRanks
from kv_transfer.select import make_transports
from rpc import codec
from rpc import worker_pb2 as pb
from rpc.channel import bind, make_server
from worker.engine_setup import build_engine, kv_shape
from worker.kv_events import KvEventHub
from worker.kv_ranks import RemoteRank, offers_to_pb
from worker.link_speed import LinkSpeeds
from worker.outputs import OutputHub
from worker.ranks import INCARNATION, Followers, address_of, join
from worker.step_stream import StepStreams

logger = logging.getLogger(__name__)

T = TypeVar("T")
_STATUS_SECONDS = 0.1
_DRAIN_CHECK_SECONDS = 0.05
_GRAMMAR_SECONDS = 90.0  # others' grammars first, and the start of the process that compiles


class WorkerRuntime:
    """Owns the engine loop, the transports and the server of one incarnation of a worker.

    `failed` resolves when the engine thread has crashed for good; the process must then exit, and
    whoever started it starts a fresh one.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.state = WorkerState.STARTING
        self.outputs = OutputHub()
        self.transports: dict[str, KVTransfer] = {}
        self.transport_in_use = ""
        self._remote_ranks: list[RemoteRank] = []
        self._rank_infos: list[pb.KvRankInfo] = []
        self.carriers = CarrierWatch()
        self.links = LinkSpeeds()
        self.kv_bytes_sent = 0
        self.kv_bytes_received = 0
        self.transfers_ok = 0
        self.transfers_failed = 0
        self.aborts = 0
        self.controller = ""  # where it is, as it said last; for routers that have lost it
        self.compatibility: dict[str, str] = {}
        self.server = make_server()
        self.steps: StepStreams | None = None  # of workers that decode
        self.followers = Followers(settings.worker_id, self._on_crash)
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._snapshot: tuple[EngineStats, KVBlockCounts] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._info: pb.WorkerInfo | None = None

    # ------------------------------------------------------------ start and stop

    async def load(self, progress: Callable[[str], None]) -> None:
        """Loads the model and starts the engine thread. Raises ConfigError and ModelError, and
        RankLostError where another process of this worker did not get as far."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        native.set_idle_threads(settings.idle_threads)
        ranks = await asyncio.to_thread(join, settings) if settings.num_ranks > 1 else None
        if ranks is not None:
            await asyncio.to_thread(ranks.publish, INCARNATION, self.incarnation)
        files = await asyncio.to_thread(resolve_model, settings.config.model, progress=progress)
        self.engine = await asyncio.to_thread(self._build_engine, files, progress, ranks)
        if ranks is not None:
            await self._attend(ranks)
        self._grammars = GrammarCompiler(files, self.engine.model.config.vocab_size)
        pool = self.engine.pool
        self.kv_events = KvEventHub(self.incarnation, pool.num_blocks)
        pool.on_change = self.kv_events.note
        # One that has all cores leaves none: what else runs there takes turns with it.
        leaves_cores = (
            settings.role is not Role.COLOCATED
            and self.engine.kv_cache.device.type == "cpu"
            and settings.threads < available_cpus()
        )
        self.engine_loop = EngineLoop(
            self.engine,
            self._on_outputs,
            self._on_crash,
            pace=settings.engine.decode_pace if leaves_cores else 0.0,
            prompt_is_read=host_sign().is_raised,
        )
        self.engine_loop.start()
        await self.run_on_engine(lambda _: native.settle_threads())
        await self._take_snapshot()
        self.in_background(self._keep_snapshot())
        if settings.role is not Role.COLOCATED:
            self.transports = make_transports(
                settings.config.kv_transfer.transport,
                self.engine.kv_cache,
                worker_id=settings.worker_id,
                incarnation=self.incarnation,
                compression=settings.config.kv_transfer.compression,
                row_bytes=self._kv_shape.row_bytes,
            )
            await self._gather_kv_ranks()

    async def _gather_kv_ranks(self) -> None:
        """This rank's part of hand-overs, and the others', which serve already."""
        self.kv_rank = KVRank(self.engine.kv_cache, self._kv_shape, self.transports)
        self._remote_ranks = [
            RemoteRank(rank, address)
            for rank, address in enumerate(self.followers.addresses[1:], start=1)
        ]
        self.kv_ranks = KVRanks(self._kv_shape, [self.kv_rank, *self._remote_ranks])
        self._rank_infos = [await rank.info() for rank in self._remote_ranks]

    async def _attend(self, ranks: RankGroup) -> None:
        """Waits until the other ranks serve, and watches over them from then on."""
        await asyncio.to_thread(ranks.barrier)
        addresses = [
            await asyncio.to_thread(ranks.lookup, address_of(rank)) for rank in range(1, ranks.size)
        ]
        await self.followers.attend(addresses, self.incarnation)

    def _build_engine(
        self, files: ModelFiles, progress: Callable[[str], None], ranks: RankGroup | None
    ) -> Engine:
        engine, model = build_engine(files, self.settings, progress, ranks)
        self._kv_shape = kv_shape(model, self.settings)
        self.compatibility = describe(self._kv_shape, **model.compatibility())
        return engine

    async def serve(self) -> None:
        """Binds the server, with the services that were added to it, and becomes ready."""
        settings = self.settings
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        port = bind(self.server, f"{settings.host}:{settings.port}")
        steps_address = await self.steps.listen(settings.host) if self.steps is not None else ""
        self._info = self._make_info(f"{settings.host}:{port}", steps_address)
        await self.server.start()
        await self._be_ready()
        logger.info("%s ready at %s, incarnation %s", settings.worker_id, self.info.address,
                    self.incarnation)  # fmt: skip

    @property
    def num_requests(self) -> int:
        """Requests that have a call open here: queued, running, or held for a peer."""
        return len(self.outputs)

    async def drain(self, grace_s: float = 0.0) -> bool:
        """Takes nothing new; what runs goes on, and so do hand-overs. Returns True as soon as no
        request is left, False when some still are after `grace_s`."""
        self.state = WorkerState.DRAINING
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        deadline = time.monotonic() + grace_s
        while self.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_CHECK_SECONDS)
        return not self.num_requests

    async def take_role(self, role: Role) -> None:
        """Serves on as another role, in a fresh incarnation, with the same engine, transports and
        KV blocks; what the prefix cache holds stays. After a drain. Raises EngineError, and is
        what it was, while the engine still has sequences."""
        settings = replace(self.settings, role=role)
        await self.run_on_engine(lambda engine: engine.set_limits(settings.engine))
        self.settings = settings
        self.incarnation = self.kv_events.incarnation = uuid.uuid4().hex
        self._info = self._make_info(self.info.address, self.info.steps_address)

    async def resume(self) -> None:
        """Takes requests again after a drain."""
        if self.state is WorkerState.DRAINING:
            await self._be_ready()

    async def _be_ready(self) -> None:
        self.state = WorkerState.READY
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Ends everything: calls get `grace_s` to finish, then are cancelled. Idempotent."""
        self.state = WorkerState.DEAD
        await self.server.stop(grace_s)
        if self.steps is not None:
            await self.steps.close()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for transport in self.transports.values():
            await transport.close()
        self.transports = {}
        for rank in self._remote_ranks:
            await rank.close()
        if hasattr(self, "engine_loop"):
            has_stopped = await asyncio.to_thread(self.engine_loop.stop, 10.0)
            self.followers.expect_end()
            if has_stopped and isinstance(self.engine.model, TensorParallel):
                await asyncio.to_thread(self.engine.model.close)
            await asyncio.to_thread(self._grammars.close)
        await self.followers.close()
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ identity

    @property
    def info(self) -> pb.WorkerInfo:
        assert self._info is not None, "info exists after serve()"
        return self._info

    def _make_info(self, address: str, steps_address: str) -> pb.WorkerInfo:
        settings, engine = self.settings, self.engine
        return pb.WorkerInfo(
            id=settings.worker_id,
            role=codec.role_to_pb(settings.role),
            host=socket.gethostname(),
            pid=os.getpid(),
            address=address,
            incarnation=self.incarnation,
            model=self.compatibility.get("model", ""),
            compatibility=self.compatibility,
            max_model_len=engine.max_model_len,
            block_size=settings.engine.block_size,
            num_kv_blocks=engine.kv_cache.shape[0],
            kv_block_bytes=engine.kv_cache[0].numel()
            * engine.kv_cache.itemsize
            * settings.num_ranks,
            max_num_seqs=settings.engine.max_num_seqs,
            prefix_caching=settings.engine.enable_prefix_caching,
            max_batched_tokens=settings.engine.max_num_batched_tokens,
            transports=offers_to_pb(self.transports),
            ranks=self._rank_infos,
            steps_address=steps_address,
        )

    def check_incarnation(self, incarnation: str) -> None:
        """Raises StalePeerError if the caller means an earlier life of this worker."""
        if incarnation != self.incarnation:
            raise StalePeerError(
                f"{self.settings.worker_id} has restarted: incarnation {incarnation or '(none)'} "
                f"is gone"
            )

    def check_callable(self, incarnation: str) -> None:
        """Raises unless a new request that names `incarnation` may start here."""
        self.check_incarnation(incarnation)
        if self.state is not WorkerState.READY:
            raise UnavailableError(f"{self.settings.worker_id} is {self.state}")

    # ------------------------------------------------------------ the engine's outputs

    async def run_on_engine(self, function: Callable[[Engine], T]) -> T:
        """Runs `function` on the engine thread between two steps."""
        return await asyncio.wrap_future(self.engine_loop.call(function))

    def add_on_engine(self, request_id: str, add: Callable[[Engine], None]) -> None:
        """Runs `add` on the engine thread between two steps, without waiting: the event loop would
        wake up in the request's first step, on a core that computes it. What it raises comes as the
        request's output."""

        def added(future: Future[None]) -> None:  # on the engine thread
            error = future.exception()
            if error is None:
                return
            if not isinstance(error, PdserveError):
                error = EngineError(f"the engine could not take the request: {error}")
            self._loop.call_soon_threadsafe(self.outputs.fail, request_id, error)

        self.engine_loop.call(add).add_done_callback(added)

    async def matcher(self, request: GenerationRequest) -> Matcher | None:
        """A fresh matcher for a request with a grammar, compiled off the loop and the engine's
        thread. Raises RequestError for a grammar that cannot be used."""
        sampling = request.sampling
        if sampling.grammar is None:
            return None
        make = partial(self._grammars.matcher, sampling.grammar, sampling.stop_token_ids)
        try:
            async with asyncio.timeout(_GRAMMAR_SECONDS):
                return await self._loop.run_in_executor(self._grammar_thread, make)
        except TimeoutError:
            raise OverloadedError("too many grammars are being compiled") from None

    def abort(self, request_id: str) -> None:
        """Frees whatever the engine holds for a request, soon; never fails."""
        self.aborts += 1
        self.engine_loop.call(lambda engine: engine.abort(request_id))

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` to its end, at the latest until `stop`."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:  # engine thread
        self._loop.call_soon_threadsafe(self.outputs.dispatch, outputs)

    def _on_crash(self, error: BaseException) -> None:  # engine thread, or a rank has gone
        def crashed() -> None:
            self.state = WorkerState.DEAD
            self.outputs.fail_all(EngineError(f"the engine crashed: {error}"))
            if not self.failed.done():
                self.failed.set_result(error)

        self._loop.call_soon_threadsafe(crashed)

    # ------------------------------------------------------------ status

    async def _take_snapshot(self) -> None:
        self._snapshot = await self.run_on_engine(lambda e: (e.stats(), e.block_counts()))

    async def _keep_snapshot(self) -> None:
        """The engine answers between two steps; in a long step the last answer stands."""
        while True:
            await self._take_snapshot()
            await asyncio.sleep(_STATUS_SECONDS)

    @property
    def snapshot(self) -> tuple[EngineStats, KVBlockCounts]:
        """What the engine said last, a moment ago."""
        assert self._snapshot is not None, "a snapshot exists after load()"
        return self._snapshot


def now() -> float:
    """The worker's clock: monotonic seconds, never sent to another host."""
    return time.monotonic()
