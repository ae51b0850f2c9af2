"""The controller: holds the wanted state, keeps the workers at it, publishes what is.

It is a plain asyncio object, so that any process may own it: the `pdserve up` command, a test.
"""

import asyncio
import logging
from typing import Any

from cluster.sizing import bundle_for, share_of
from cluster.view import ClusterService, ViewPublisher
from cluster.worker_slot import SlotOptions, WorkerSlot
from core.config import Config
from core.errors import PdserveError, UnavailableError
from core.types import Role
from core.worker_settings import WorkerSettings
from rpc import cluster_pb2_grpc
from rpc.channel import make_server

logger = logging.getLogger(__name__)


class Controller:
    """Owns every worker of one deployment, from `start` to `stop`, and the service that tells
    routers about them. Needs a running Ray. After `stop` nothing that it started is left."""

    def __init__(self, config: Config, options: SlotOptions) -> None:
        self.config = config
        self.publisher = ViewPublisher()
        self.shutdown_requested = asyncio.Event()
        self.address = ""
        self._options = options
        self._slots: dict[str, WorkerSlot] = {}
        self._server: Any = None

    async def start(self, host: str = "127.0.0.1") -> None:
        """Binds the service on a free port of `host` and begins to start all workers, at once."""
        self._server = make_server()
        service = ClusterService(self.publisher, self.shutdown_requested)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(service, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        await self._server.start()
        for pool in self.config.active_pools:
            for index in range(getattr(self.config.pools, pool).replicas):
                self._add_slot(pool, index)

    async def wait_ready(self) -> None:
        """Returns when every worker has been ready once. Raises as soon as one cannot: a wrong
        configuration or model, no place for it, or death after death while it starts."""
        waiting = {slot.first_ready: worker_id for worker_id, slot in self._slots.items()}
        if not waiting:
            return
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            if isinstance(error, PdserveError):
                log = f"; see {self._options.log_dir}" if self._options.log_dir else ""
                raise UnavailableError(f"{waiting[future]}: {error.message}{log}") from error
            if error is not None:
                raise error

    async def stop(self, grace_s: float) -> None:
        """Ends all workers together, within about `grace_s`, then the service. Idempotent."""
        slots, self._slots = list(self._slots.values()), {}
        await asyncio.gather(*(slot.stop(grace_s) for slot in slots), return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def _add_slot(self, pool: str, index: int) -> None:
        is_local = self.config.ray.address is None
        share = share_of(self.config, pool, is_local)
        settings = WorkerSettings(
            worker_id=f"{pool}-{index}",
            role=Role(pool),
            config=self.config,
            host="127.0.0.1" if is_local else "",
            num_threads=share.num_threads,
            kv_memory_bytes=share.kv_memory_bytes,
        )
        bundle = bundle_for(getattr(self.config.pools, pool))
        self._slots[settings.worker_id] = WorkerSlot(
            settings, bundle, self.publisher, self._options
        )
