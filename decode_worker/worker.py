"""One decode (or colocated) worker: a runtime, its peers and its service."""

from core.worker_settings import WorkerSettings
from decode_worker.decode_service import DecodeService
from decode_worker.peers import PeerBook
from rpc import worker_pb2_grpc
from worker.base import Worker
from worker.runtime import WorkerRuntime
from worker.step_stream import StepStreams


class DecodeWorker(Worker):
    def __init__(self, settings: WorkerSettings, runtime: WorkerRuntime | None = None) -> None:
        """`runtime`: of a worker that has another role too."""
        super().__init__(runtime or WorkerRuntime(settings))
        self.peers = PeerBook(self.runtime)

    def add_services(self) -> None:
        steps = self.runtime.steps = StepStreams(self.runtime.check_incarnation)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(
            DecodeService(self.runtime, self.peers, steps), self.runtime.server
        )

    async def stop(self, grace_s: float = 0.0) -> None:
        await super().stop(grace_s)
        await self.peers.close()
