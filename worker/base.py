"""What a worker of every role is to the process around it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from rpc import worker_pb2 as pb
from worker.runtime import WorkerRuntime
from worker.status import add_status_service


class Worker(ABC):
    """Start it, serve until `failed` or until told to stop. Each role adds its services to one
    runtime, and ends what it owns beside it."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime

    @property
    def info(self) -> pb.WorkerInfo:
        return self.runtime.info

    @property
    def failed(self) -> "asyncio.Future[BaseException]":
        return self.runtime.failed

    @property
    def num_requests(self) -> int:
        return self.runtime.num_requests

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ModelError. Afterwards the worker answers at `info.address`."""
        await self.runtime.load(progress)
        self.add_services()
        add_status_service(self.runtime)
        await self.runtime.serve()

    @abstractmethod
    def add_services(self) -> None:
        """To the runtime's server, once the engine is there."""

    async def drain(self, grace_s: float = 0.0) -> bool:
        return await self.runtime.drain(grace_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.runtime.stop(grace_s)
