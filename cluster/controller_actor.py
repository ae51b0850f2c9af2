"""The controller in a process of its own: a named, detached Ray actor, which Ray starts again when
it dies; one that hangs is killed for it (watchdog.py). Workers and routers do not notice: it comes
back at the same address and finds them. When its node is lost it may come back on another one, if
it was not on the head's: routers then hear from the workers where it is."""

import asyncio
import logging
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import ray

from cluster.actor_process import end_with_raylet, keep_old_logs, log_to, node_address
from cluster.addresses import host_on
from cluster.controller import Controller
from cluster.wanted import WantedFile
from cluster.watchdog import PATIENCE_S, Watchdog
from cluster.worker_slot import SlotOptions
from core.config import Config
from core.errors import PdserveError, UnavailableError
from core.logs import use_format
from rpc.cluster_token import cluster_token, set_cluster_token
from rpc.tls import use_internal_tls

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
_BIND_AGAIN_S = 60.0  # one that comes back waits so long for its port
_BIND_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """What `pdserve up` starts a controller with. Ray keeps it, and starts it again with it."""

    config: Config
    options: SlotOptions
    host: str
    port: int  # 0: any free one
    node: str  # the address of the node that `host` is of
    log_dir: Path
    wanted_path: Path  # of the file with the wanted state, on the controller's node
    cluster_token: str = field(repr=False)
    model_path: Path | None = None
    patience_s: float = PATIENCE_S  # after which it is taken to hang, and killed
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Facts:
    """What its `pdserve up` has to know of a controller."""

    address: str  # that it is bound to
    config: Config  # the wanted state
    cluster_token: str = field(repr=False)
    node: str = ""  # the address of the node that it is on
    is_ending: bool = False
    error: str = ""  # why it could not start; it is of no use then


class ControllerActor:
    """Owns a Controller and its watchdog, from the creation of the actor to the end of its process.
    It ends when it was asked to by ClusterService.Shutdown, after all workers; Ray does not start
    it again then."""

    async def __init__(self, spec: ControllerSpec) -> None:  # type: ignore[misc]
        end_with_raylet()
        set_cluster_token(spec.cluster_token)
        self._spec = spec
        self._node = node_address()
        self._error = ""
        file = WantedFile(spec.wanted_path)
        self._controller = Controller(
            spec.config, spec.options, spec.model_path, file, spec.id, self._node
        )
        if not self._controller.has_come_back and self._node == spec.node:
            keep_old_logs(spec.log_dir)
        log_to(spec.log_dir / "controller.log")
        use_format(spec.config.log_format)
        logger.info("the controller begins (pid %s)", os.getpid())
        self._watchdog = Watchdog(spec.patience_s)
        self._watchdog.start()
        try:
            use_internal_tls(spec.config)
            await self._start(spec)
        except PdserveError as error:
            logger.error("cannot start: %s", error)
            self._error = error.message
            return
        self._ending = asyncio.create_task(self._end_when_asked(), name="end when asked")

    async def facts(self) -> Facts:
        if self._error:
            return Facts("", self._spec.config, "", error=self._error)
        controller = self._controller
        return Facts(
            controller.address,
            controller.config,
            cluster_token(),
            self._node,
            controller.shutdown_requested.is_set(),
        )

    async def _start(self, spec: ControllerSpec) -> None:
        deadline = asyncio.get_running_loop().time() + _BIND_AGAIN_S
        host = spec.host if self._node == spec.node else host_on(self._node, spec.host)
        while True:
            try:
                await self._controller.start(host, spec.port)
                return
            except UnavailableError as error:
                is_late = asyncio.get_running_loop().time() > deadline
                if not self._controller.has_come_back:
                    raise
                if is_late:
                    logger.error("%s; giving up", error)
                    os._exit(1)  # Ray starts it again
                logger.warning("%s; trying again", error)
            await asyncio.sleep(_BIND_EVERY_S)

    async def _end_when_asked(self) -> None:
        await self._controller.shutdown_requested.wait()
        try:
            await self._controller.stop(_GRACE_S)
        except Exception:
            logger.exception("not all was stopped in order")
        me = ray.get_runtime_context().current_actor
        await asyncio.to_thread(ray.kill, me, no_restart=True)
