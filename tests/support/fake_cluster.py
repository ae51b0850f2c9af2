"""A controller in this process, and fake workers."""

import asyncio
from collections.abc import AsyncIterator, Callable

from core.types import Role
from rpc import cluster_pb2, cluster_pb2_grpc, worker_pb2
from rpc.channel import bind, make_server
from support.fake_workers import FakeWorker, HandOvers


class FakeCluster:
    """The controller, and every worker that was ever started."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.states: dict[str, worker_pb2.WorkerState] = {}
        self.everyone: list[FakeWorker] = []
        self.controller = ""
        self._hand_overs = HandOvers()
        self.queue_reports: list[cluster_pb2.QueueReport] = []
        self._watchers: set[asyncio.Queue[None]] = set()
        self._server = make_server()
        self._version = 0

    async def start(self) -> None:
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(_Controller(self), self._server)
        self.controller = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        await self._server.start()

    async def close(self) -> None:
        await self.stop_controller()
        await asyncio.gather(*(worker.close() for worker in self.everyone))

    async def move_controller(self) -> None:
        """It is lost, and comes back at another address."""
        await self.stop_controller()
        self._server = make_server()
        await self.start()

    async def stop_controller(self) -> None:
        await self._server.stop(None)

    async def add(
        self, worker_id: str, role: Role, prepare: Callable[[FakeWorker], None] | None = None
    ) -> FakeWorker:
        """Starts a worker, as a fresh incarnation if the id is known, and publishes it."""
        worker = FakeWorker(self._hand_overs, worker_id, role)
        if prepare is not None:
            prepare(worker)
        await worker.start()
        self.everyone.append(worker)
        self.workers[worker_id] = worker
        self.set_state(worker_id, worker_pb2.WORKER_STATE_READY)
        return worker

    def set_state(self, worker_id: str, state: worker_pb2.WorkerState) -> None:
        self.states[worker_id] = state
        self.publish()

    def remove(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.publish()

    def publish(self) -> None:
        self._version += 1
        for queue in self._watchers:
            queue.put_nowait(None)

    def view(self) -> cluster_pb2.ClusterView:
        entries = [worker.entry(self.states[worker.id]) for worker in self.workers.values()]
        return cluster_pb2.ClusterView(version=self._version, workers=entries)

    @property
    def is_quiet(self) -> bool:
        """No call is open anywhere and nothing is held."""
        return all(not worker.active and not worker.held for worker in self.everyone)


class _Controller(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def Watch(self, request, context) -> AsyncIterator[cluster_pb2.ClusterView]:
        queue: asyncio.Queue[None] = asyncio.Queue()
        self._cluster._watchers.add(queue)
        try:
            while True:
                yield self._cluster.view()
                try:
                    async with asyncio.timeout(5):
                        await queue.get()
                except TimeoutError:
                    continue
        finally:
            self._cluster._watchers.discard(queue)

    async def ReportQueue(self, request, context) -> cluster_pb2.QueueReportResponse:
        self._cluster.queue_reports.append(request)
        return cluster_pb2.QueueReportResponse()
