"""Workers without an engine, for tests of the control plane. They are built in Ray's processes,
which find this module by PYTHONPATH."""

import asyncio
import os
import uuid
from collections.abc import Callable

from core.errors import ModelError
from core.worker_settings import WorkerSettings
from rpc import codec
from rpc import worker_pb2 as pb


class FakeWorker:
    """Becomes ready at once and serves nothing."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def start(self, progress: Callable[[str], None]) -> None:
        progress("loading nothing")
        print("hello from", self.settings.worker_id)
        self.info = pb.WorkerInfo(
            id=self.settings.worker_id,
            role=codec.role_to_pb(self.settings.role),
            host=self.settings.host,
            pid=os.getpid(),
            address=f"{self.settings.host}:{10000 + os.getpid() % 20000}",
            incarnation=uuid.uuid4().hex,
            compatibility={"threads": os.environ["OMP_NUM_THREADS"]},
        )

    async def stop(self, grace_s: float) -> None:
        if not self.failed.done():
            self.failed.cancel()


class CrashingWorker(FakeWorker):
    """Dies without a word while it starts, as one that the kernel kills for memory."""

    async def start(self, progress: Callable[[str], None]) -> None:
        os._exit(9)


class FailingWorker(FakeWorker):
    """Is ready, and then its engine crashes."""

    async def start(self, progress: Callable[[str], None]) -> None:
        await super().start(progress)
        self.failed.set_result(RuntimeError("the engine exploded"))


class ModellessWorker(FakeWorker):
    async def start(self, progress: Callable[[str], None]) -> None:
        raise ModelError("no such model: nothing")
