"""The controller: holds the wanted state, keeps the workers at it, publishes what is.

It is a plain asyncio object, so that any process may own it: an actor (controller_actor.py), a
test. Workers do not die with it. One that comes back finds them, and what was wanted of them.
"""

import asyncio
import contextlib
import logging
import uuid
from pathlib import Path
from typing import Any

import ray

from cluster.addresses import reached_at
from cluster.autoscaling import Autoscaling
from cluster.lives import Life, end_lives, find_lives
from cluster.load_watch import LoadWatch
from cluster.operations import Operations, resized
from cluster.service import ClusterService
from cluster.sizing import bundle_for, check_room, local_bundle, share_of
from cluster.view import ViewPublisher
from cluster.wanted import Notice, Wanted, WantedFile, next_version
from cluster.worker_slot import SlotOptions, WorkerSlot
from core.config import Config
from core.errors import ConfigError, PdserveError, RequestError, UnavailableError
from core.host import available_memory
from core.types import Role
from core.worker_settings import WorkerSettings
from rpc import cluster_pb2_grpc
from rpc.channel import bind, make_server
from rpc.cluster_token import cluster_token, set_cluster_token

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5  # from the end of all workers to the end of the service


class Controller:
    """Owns every worker of one deployment, from `start` to `stop`, and the service that tells
    routers about them and takes operations. Needs a running Ray. `config` is the wanted state;
    operations change it. After `stop` nothing of the deployment is left; when its process dies,
    all workers are, for the next one to find."""

    def __init__(
        self,
        config: Config,
        options: SlotOptions,
        model_path: Path | None = None,
        wanted_file: WantedFile | None = None,
        controller_id: str = "",
        node: str = "127.0.0.1",
    ) -> None:
        """`model_path`: of the weights, to know whether more workers fit on this machine.
        `wanted_file`: where the wanted state is kept, beside the workers. If one with the same id
        has left something there, this is the same controller come back: it goes by the newest of
        it, and not by `config`. `node`: the address of this machine."""
        self.publisher = ViewPublisher()
        self.shutdown_requested = asyncio.Event()
        self.stopped = asyncio.Event()
        self.address = ""
        self._file = wanted_file
        self._id = controller_id or uuid.uuid4().hex
        self._left = wanted_file.load(self._id) if wanted_file is not None else None
        self._config = self._left.config if self._left is not None else config
        self._node = node
        self._version = 0
        self._notice = Notice()
        self.operations = Operations(self, options.drain_grace_s, options.settle_s)
        self._options = options
        self._model_path = model_path
        self._slots: dict[str, WorkerSlot] = {}
        self._leaving: dict[str, WorkerSlot] = {}  # draining: not wanted, not gone yet
        self._server: Any = None
        self._loads = LoadWatch(self.publisher)
        self.queues = self._loads.queues
        self._autoscaling: asyncio.Task[None] | None = None
        self._seeing_off: set[asyncio.Task[None]] = set()

    @property
    def has_come_back(self) -> bool:
        """Whether it is one that has died, and goes on with what it has left."""
        return self._left is not None

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        """Kept first: raises UnavailableError, and changes nothing, if it cannot be."""
        self._keep(config)
        self._config = config

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Finds the workers that a controller before it has left, binds the service, on a free
        port if it is 0, and begins to start all others at once. Raises UnavailableError if it
        cannot be bound; then nothing has been changed, and it may be tried again. One that comes
        back on the same node binds where it was before."""
        lives = await find_lives(self._options.deployment)
        self._recall(lives)
        if self._left is not None and self._left.node == self._node:
            host, _, left_port = self._left.address.rpartition(":")
            port = int(left_port)
        if lives:  # a token of our own would keep us out
            set_cluster_token(lives[0].settings.cluster_token)
        server = make_server()
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterService(self), server)
        try:
            self.address = f"{host}:{bind(server, f'{host}:{port}')}"
        except RuntimeError as error:
            raise UnavailableError(f"the controller cannot bind {host}:{port}") from error
        self._server = server
        self._notice.address = reached_at(self.address, self._node)
        self.config = resized(self.config, _first_sizes(self.config))
        for life in lives:
            self._take_over(life)
        if self._left is not None and self._left.is_ending:
            self.shutdown_requested.set()
        else:
            for pool in self.config.active_pools:
                for _ in range(self.config.pools.named(pool).replicas - len(self.workers(pool))):
                    self._add_slot(pool, self.config)
            if lives:
                work = self.operations.reconcile(lambda text: logger.info("%s", text))
                self.operations.begin("the return to what is wanted", work)
            autoscaling = Autoscaling(self, self.operations, self._loads)
            self._autoscaling = asyncio.create_task(autoscaling.run(), name="autoscaling")
        await server.start()  # the first view has all that were found

    async def wait_ready(self) -> None:
        """Returns when every worker has been ready once. Raises as soon as one cannot: a wrong
        configuration or model, no place for it, or death after death while it starts."""
        waiting = {slot.first_ready: worker_id for worker_id, slot in self._slots.items()}
        if not waiting:
            return
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            if future.cancelled():  # taken away before it was ready
                continue
            error = future.exception()
            if isinstance(error, PdserveError):
                log = f"; see {self._options.log_dir}" if self._options.log_dir else ""
                raise UnavailableError(f"{waiting[future]}: {error.message}{log}") from error
            if error is not None:
                raise error

    async def stop(self, grace_s: float) -> None:
        """Ends all workers together, within about `grace_s`, then the service. Idempotent."""
        self.publisher.end()
        with contextlib.suppress(UnavailableError):  # a full disk is no reason to go on
            self._keep(self._config, is_ending=True)
        for task in self._seeing_off:
            task.cancel()
        if self._autoscaling is not None:
            self._autoscaling.cancel()
            await asyncio.gather(self._autoscaling, return_exceptions=True)
        await self._loads.stop()
        await self.operations.stop()
        slots = [*self._slots.values(), *self._leaving.values()]
        self._slots, self._leaving = {}, {}
        await asyncio.gather(*(slot.stop(grace_s) for slot in slots), return_exceptions=True)
        if not self.stopped.is_set():
            await end_lives(self._options.deployment)  # what a slot may have lost sight of
        self.stopped.set()
        if self._server is not None:
            await self._server.stop(_LAST_WORDS_S)
            self._server = None

    def _recall(self, lives: list[Life]) -> None:
        """What this controller has left with its workers, if that is newer than its file, or if
        the file is on another node."""
        for life in lives:
            left = Wanted.from_json(life.wanted, self._id)
            if left is not None and (self._left is None or left.version > self._left.version):
                self._left, self._config = left, left.config
        if self._left is not None:
            self._version = self._left.version

    def _keep(self, config: Config, is_ending: bool = False) -> None:
        self._version = next_version(self._version)
        wanted = Wanted(self._id, config, self.address, self._node, is_ending, self._version)
        if self._file is not None:
            self._file.save(wanted)
        self._notice.wanted = wanted.to_json()
        for slot in self._slots.values():
            slot.tell()

    def _take_over(self, life: Life) -> None:
        """A worker that was found. One that was drained, or whose pool is not used any more, goes
        when what runs there has ended."""
        settings, pool = life.settings, life.settings.role.value
        bundle = self._bundle(pool, settings.config)
        slot = WorkerSlot(settings, bundle, self.publisher, self._options, self._notice, life=life)
        if life.is_draining or pool not in self.config.active_pools:
            logger.info("found %s, which goes", slot.id)
            self._leaving[slot.id] = slot
            task = asyncio.create_task(self._see_off(slot), name=f"see off {slot.id}")
            self._seeing_off.add(task)
            task.add_done_callback(self._seeing_off.discard)
        else:
            logger.info("found %s again", slot.id)
            self._slots[slot.id] = slot

    async def _see_off(self, slot: WorkerSlot) -> None:
        await asyncio.wait([slot.first_ready])
        await self.remove(slot, self._options.drain_grace_s)

    # ------------------------------------------------------------ the fleet

    def workers(self, pool: str) -> list[WorkerSlot]:
        """Those of a pool that are wanted, oldest first."""
        return [slot for slot in self._slots.values() if slot.pool == pool]

    def add(self, pool: str, config: Config, is_trial: bool) -> WorkerSlot:
        """Begins to start one more worker. Raises RequestError if this machine cannot hold it."""
        try:
            self._check_room(pool, config)
        except ConfigError as error:
            raise RequestError(error.message) from error
        return self._add_slot(pool, config, is_trial)

    async def has_room(self, pool: str, config: Config) -> bool:
        """Whether one more worker has a place now. On a cluster of several nodes the free sum
        may be spread too thin; then the placement itself says so."""
        try:
            self._check_room(pool, config)
        except ConfigError:
            return False
        free = await asyncio.to_thread(ray.available_resources)
        bundle, ranks = self._bundle(pool, config), config.pools.named(pool).tensor_parallel_size
        return all(free.get(name, 0.0) >= ranks * amount for name, amount in bundle.items())

    async def remove(self, slot: WorkerSlot, grace_s: float) -> bool:
        """Drains and ends a worker. False if something ran on when the grace was over."""
        self._slots.pop(slot.id, None)
        self._leaving[slot.id] = slot
        try:
            is_quiet = await slot.drain(grace_s)
        finally:
            await slot.stop(0.0)
            self._leaving.pop(slot.id, None)
        return is_quiet

    def _check_room(self, pool: str, config: Config) -> None:
        if self._model_path is None or config.ray.address is not None:
            return
        if not any(config.pools.named(p).resources.get("GPU") for p in config.active_pools):
            check_room(config, pool, self._model_path, available_memory())

    def _bundle(self, pool: str, config: Config) -> dict[str, float]:
        """Of each rank of a worker."""
        bundle = bundle_for(config.pools.named(pool))
        return local_bundle(bundle) if config.ray.address is None else bundle

    def _add_slot(self, pool: str, config: Config, is_trial: bool = False) -> WorkerSlot:
        is_local = config.ray.address is None
        share = share_of(config, pool, is_local)
        taken = {*self._slots, *self._leaving}
        roles = tuple(Role(role) for role in config.roles_of(pool))
        name = pool if len(roles) == 1 else "worker"  # one that need not stay in its pool
        index = next(i for i in range(len(taken) + 1) if f"{name}-{i}" not in taken)
        settings = WorkerSettings(
            worker_id=f"{name}-{index}",
            role=Role(pool),
            roles=roles,
            config=config,
            host="127.0.0.1" if is_local else "",
            num_threads=share.num_threads,
            kv_memory_bytes=share.kv_memory_bytes,
            cluster_token=cluster_token(),
        )
        slot = WorkerSlot(
            settings,
            self._bundle(pool, config),
            self.publisher,
            self._options,
            self._notice,
            is_trial,
        )
        self._slots[slot.id] = slot
        return slot


def _first_sizes(config: Config) -> dict[str, int]:
    """Of the pools that scale themselves: what the file says, within their bounds."""
    pools = {pool: config.pools.named(pool) for pool in config.active_pools}
    return {n: p.autoscale.bounded(p.replicas) for n, p in pools.items() if p.autoscale is not None}
