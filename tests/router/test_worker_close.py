"""What follows a worker ends when it is told to, at whatever moment."""

import asyncio
from collections.abc import Awaitable

from router.placement.prefix_index import PrefixIndex
from router.placement.worker import Worker
from rpc import cluster_pb2, worker_pb2
from support.ports import free_port


class Statuses:
    """Of a stub: each `read` waits until the test lets it go."""

    def __init__(self) -> None:
        self.next: asyncio.Future[worker_pb2.WorkerStatus] = asyncio.Future()

    async def read(self) -> worker_pb2.WorkerStatus:
        return await self.next

    def cancel(self) -> None: ...


class Service:
    def __init__(self) -> None:
        self.statuses = Statuses()

    async def GetInfo(self, *_: object, **__: object) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(incarnation="one")

    def WatchStatus(self, _: object) -> Statuses:
        return self.statuses


async def within_seconds(work: Awaitable[None]) -> None:
    async with asyncio.timeout(10):
        await work


async def test_a_status_that_comes_in_the_same_moment_does_not_keep_it() -> None:
    entry = cluster_pb2.WorkerEntry(
        id="prefill-0", incarnation="one", address=f"127.0.0.1:{free_port()}",
        role=worker_pb2.ROLE_PREFILL,
    )  # fmt: skip
    worker = Worker(entry, PrefixIndex(), lambda: None, lambda: None)
    worker._service = service = Service()
    await asyncio.sleep(0.05)  # it waits for a status
    first, service.statuses.next = service.statuses.next, asyncio.Future()
    first.set_result(worker_pb2.WorkerStatus())
    await within_seconds(worker.close("it is gone"))
