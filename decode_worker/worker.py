"""One decode (or colocated) worker: a runtime, its peers and its service."""

import asyncio
from collections.abc import Callable

from core.worker_settings import WorkerSettings
from decode_worker.decode_service import DecodeService
from decode_worker.peers import PeerBook
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from worker.runtime import WorkerRuntime
from worker.status import add_status_service


class DecodeWorker:
    """Start it, serve until `failed` or until told to stop."""

    def __init__(self, settings: WorkerSettings, runtime: WorkerRuntime | None = None) -> None:
        """`runtime`: of a worker that has another role too."""
        self.runtime = runtime or WorkerRuntime(settings)
        self.peers = PeerBook(self.runtime)

    @property
    def info(self) -> pb.WorkerInfo:
        return self.runtime.info

    @property
    def failed(self) -> "asyncio.Future[BaseException]":
        return self.runtime.failed

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ModelError. Afterwards the worker answers at `info.address`."""
        await self.runtime.load(progress)
        self.add_services()
        add_status_service(self.runtime)
        await self.runtime.serve()

    def add_services(self) -> None:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(
            DecodeService(self.runtime, self.peers), self.runtime.server
        )

    @property
    def num_requests(self) -> int:
        return self.runtime.num_requests

    async def drain(self, grace_s: float = 0.0) -> bool:
        return await self.runtime.drain(grace_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.runtime.stop(grace_s)
        await self.peers.close()
