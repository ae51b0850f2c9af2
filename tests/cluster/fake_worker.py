"""Workers without an engine, for tests of the control plane. They are built in Ray's processes,
which find this module by PYTHONPATH."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from core.errors import EngineError, ModelError
from core.types import Role
from core.worker_settings import WorkerSettings
from rpc import codec
from rpc import worker_pb2 as pb

UNHEALTHY_NUM_SEQS = 13


class FakeWorker:
    """Becomes ready at once and serves nothing. A test that names a folder as the model's served
    name says there, in a file for each worker, how many requests run on it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.runtime = self  # of which the actor wants `controller` alone
        self.controller = ""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def start(self, progress: Callable[[str], None]) -> None:
        if self.settings.engine.max_num_seqs == UNHEALTHY_NUM_SEQS:
            raise RuntimeError("not with this setting")
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

    @property
    def num_requests(self) -> int:
        folder = Path(self.settings.config.served_model_name or "/nowhere")
        try:
            return int((folder / self.settings.worker_id).read_text())
        except OSError:
            return 0

    async def drain(self, grace_s: float) -> bool:
        deadline = time.monotonic() + grace_s
        while self.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.num_requests

    async def stop(self, grace_s: float) -> None:
        print("stopped in order")


class FakeDualWorker(FakeWorker):
    """Changes its role, but stays what it is, or dies, where a file of that name says so."""

    async def switch(self, role: Role, grace_s: float) -> None:
        name = f"{self.settings.worker_id}-fault"
        fault = Path(self.settings.config.served_model_name or "/nowhere") / name
        match fault.read_text() if fault.exists() else "":
            case "stays":
                raise EngineError("1 sequences still have blocks")
            case "dies":
                os._exit(9)
        await self.drain(grace_s)
        self.settings = replace(self.settings, role=role)
        self.info.role = codec.role_to_pb(role)
        self.info.incarnation = uuid.uuid4().hex


class CrashingWorker(FakeWorker):
    """Dies without a word while it starts, as one that the kernel kills for memory."""

    async def start(self, progress: Callable[[str], None]) -> None:
        os._exit(9)


class FailingWorker(FakeWorker):
    """Is ready, and then its engine crashes."""

    async def start(self, progress: Callable[[str], None]) -> None:
        await super().start(progress)
        self.failed.set_result(RuntimeError("the engine exploded"))


class LastRank(FakeWorker):
    """The last rank of a worker, which cannot start; the others can."""

    async def start(self, progress: Callable[[str], None]) -> None:
        assert self.settings.rendezvous and self.settings.rendezvous_fd is None
        if self.settings.rank == self.settings.num_ranks - 1:
            raise ModelError(f"no memory for rank {self.settings.rank}")
        await super().start(progress)


class ModellessWorker(FakeWorker):
    async def start(self, progress: Callable[[str], None]) -> None:
        raise ModelError("no such model: nothing")
