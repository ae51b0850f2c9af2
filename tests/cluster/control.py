"""A controller with fake workers on the tests' Ray, and waiting for what it publishes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.controller import Controller
from cluster.worker_slot import SlotOptions
from core.config import Config
from rpc import cluster_pb2
from rpc import worker_pb2 as pb

PATIENCE_S = 120.0  # a bound for a busy machine, not a measure


@asynccontextmanager
async def controlled(
    config: Config,
    tmp_path: Path,
    prefill: str = "FakeWorker",
    follower: str = "FakeWorker",
    **options: object,
) -> AsyncIterator[Controller]:
    classes = {
        "prefill": f"fake_worker:{prefill}",
        "decode": "fake_worker:FakeWorker",
        "colocated": "fake_worker:FakeWorker",
        "dual": "fake_worker:FakeDualWorker",
        "follower": f"fake_worker:{follower}",
    }
    controller = Controller(
        config,
        SlotOptions(
            deployment="test",
            log_dir=str(tmp_path),
            worker_classes=classes,
            **options,  # type: ignore[arg-type]
        ),
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await controller.start()
            yield controller
    finally:
        await controller.stop(grace_s=1.0)


async def view_where(
    controller: Controller, condition: Callable[[dict[str, cluster_pb2.WorkerEntry]], bool]
) -> dict[str, cluster_pb2.WorkerEntry]:
    """Waits until the published workers satisfy a condition."""
    async for view in controller.publisher.watch():
        workers = {worker.id: worker for worker in view.workers}
        if condition(workers):
            return workers
    raise AssertionError("the view never ends")


def is_ready(entry: cluster_pb2.WorkerEntry) -> bool:
    return entry.state == pb.WORKER_STATE_READY
