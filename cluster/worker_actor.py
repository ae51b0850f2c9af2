"""The Ray actor around one worker. It runs in the worker's own process."""

import asyncio
import gc
import importlib
import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.actor_process import end_with_raylet, log_to, node_address
from core.errors import ConfigError, ModelError, PdserveError
from core.host import spare_collector
from core.logs import use_format
from core.types import Role
from core.worker_settings import WorkerSettings
from rpc.cluster_token import set_cluster_token
from rpc.tls import use_internal_tls

logger = logging.getLogger(__name__)

WORKER_CLASSES = {
    Role.PREFILL: "prefill_worker:PrefillWorker",
    Role.DECODE: "decode_worker:DecodeWorker",
    Role.COLOCATED: "decode_worker:DecodeWorker",
}
DUAL_CLASS = "dual_worker:DualWorker"  # of workers that may change their role
# After a crash of the engine the actor lives this long, for its owner to read why.
_LAST_WORDS_S = 5.0
_ANSWER_S = 0.1
FOLLOWER_CLASS = "worker.follower:FollowerWorker"


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Either `info`, a serialized WorkerInfo, or `error`. A permanent error is one that the next
    start would meet again: a wrong configuration, a model that cannot be loaded."""

    info: bytes = b""
    error: str = ""
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """What a controller that has come back asks for."""

    settings: WorkerSettings | None  # of the start; None if it has not begun
    info: bytes  # a serialized WorkerInfo, as it is now; b"" before it is ready
    is_draining: bool
    wanted: str  # the wanted state, as the last controller left it here; "" if none did


class WorkerActor:
    """Owns one worker from start to stop; never restarted in place, so one process is one
    incarnation. It outlives the controller that started it, and serves on without one. Every
    method runs on one asyncio loop; the worker keeps long work off it."""

    def __init__(self, worker_class: str, log_path: str | None) -> None:
        self._worker_class = worker_class
        self._worker: Any = None
        self._progress = "starting its process"
        self._rendezvous: socket.socket | None = None
        self._settings: WorkerSettings | None = None
        self._starting: asyncio.Task[StartOutcome] | None = None
        self._is_draining = False
        self._controller = self._wanted = ""
        end_with_raylet()
        if log_path is not None:
            log_to(Path(log_path))

    async def describe(self) -> Description:
        """What this is, for a controller that has not started it."""
        return Description(self._settings, self._info(), self._is_draining, self._wanted)

    async def remember(self, controller: str, wanted: str) -> None:
        """Where the controller is, for routers that lose it, and what it wants, for its next life
        if that is on another node."""
        self._controller, self._wanted = controller, wanted
        if self._worker is not None:
            self._tell_controller(self._worker)

    def _tell_controller(self, worker: Any) -> None:
        """To the worker's runtime, whose status tells routers. Only rank 0 has one."""
        if self._settings is not None and self._settings.rank == 0:
            worker.runtime.controller = self._controller

    async def open_rendezvous(self, host: str) -> str:
        """Of rank 0 of several: the address where they will meet, on a free port. `host` is as in
        the settings of `start`, which comes next; "" if it has come already."""
        if self._starting is not None:
            return ""
        self._rendezvous = socket.create_server((host or node_address(), 0))
        address = self._rendezvous.getsockname()
        return f"{address[0]}:{address[1]}"

    async def start(self, settings: WorkerSettings) -> StartOutcome:
        """Builds and starts the worker. `settings.host` "" stands for this node's address. Asked
        again, by a controller that has come back, it answers for the one start."""
        if self._starting is None:
            self._settings = settings
            self._starting = asyncio.create_task(self._start(settings), name="start")
        outcome = await asyncio.shield(self._starting)
        return outcome if outcome.error else StartOutcome(info=self._info())

    async def _start(self, settings: WorkerSettings) -> StartOutcome:
        # Ray sets 1. Read by OpenMP when torch is imported, which has not happened yet.
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        # Between two steps its threads would spin for milliseconds, on cores that others need.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        # The worker may be on another machine: then it is not in the environment yet.
        set_cluster_token(settings.cluster_token)
        use_format(settings.config.log_format)
        try:
            use_internal_tls(settings.config)
            self._progress = "importing"
            if not settings.host:
                settings = replace(settings, host=node_address())
            if self._rendezvous is not None:
                settings = replace(settings, rendezvous_fd=self._rendezvous.detach())
            module, _, name = self._worker_class.partition(":")
            worker = getattr(importlib.import_module(module), name)(settings)
            await worker.start(self._report)
            gc.collect()
            spare_collector()
            self._tell_controller(worker)
            self._worker = worker
            return StartOutcome()
        except (ConfigError, ModelError) as error:
            logger.error("cannot start: %s", error)
            return StartOutcome(error=str(error), is_permanent=True)
        except Exception as error:
            logger.exception("cannot start")
            return StartOutcome(error=f"{type(error).__name__}: {error}")

    async def progress(self) -> str:
        """What the start is doing now, for people."""
        return self._progress

    async def watch(self) -> str:
        """Returns why the worker failed, when it does. The process then ends by itself."""
        await asyncio.wait([self._worker.failed])
        failed: asyncio.Future[Any] = self._worker.failed
        if failed.cancelled():
            return "stopped"
        reason = failed.exception() or failed.result()
        logger.error("the worker failed and its process ends: %s", reason)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, 1)
        return f"{type(reason).__name__}: {reason}"

    async def drain(self, grace_s: float) -> bool:
        """Takes nothing new. Returns True as soon as nothing runs here any more, False when the
        grace has run out before that."""
        self._is_draining = True
        return self._worker is None or await self._worker.drain(grace_s)

    async def switch(self, role: Role, grace_s: float) -> StartOutcome:
        """Makes the worker one of another role. After an error it serves on as what it was."""
        try:
            await self._worker.switch(role, grace_s)
        except PdserveError as error:
            logger.warning("cannot become a %s worker: %s", role, error)
            return StartOutcome(error=error.message)
        return StartOutcome(info=self._worker.info.SerializeToString())

    async def num_requests(self) -> int:
        """Requests that are here now, in whatever stage."""
        return 0 if self._worker is None else self._worker.num_requests

    async def stop(self, grace_s: float) -> None:
        """Ends what runs and closes everything, within about `grace_s`. A moment after the answer
        the process exits with 0."""
        if self._worker is not None:
            await self._worker.stop(grace_s)
        logger.info("stopped")
        asyncio.get_running_loop().call_later(_ANSWER_S, os._exit, 0)

    def _info(self) -> bytes:
        return b"" if self._worker is None else bytes(self._worker.info.SerializeToString())

    def _report(self, what: str) -> None:
        self._progress = what
        logger.info("%s", what)
