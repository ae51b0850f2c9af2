"""One prefill worker: a runtime, its leases and its two services."""

import asyncio

from core.errors import PdserveError, UnavailableError
from core.worker_settings import WorkerSettings
from kv_transfer.grpc_transport import add_kv_service
from kv_transfer.lease import LeaseTable
from prefill_worker.kv_service import KvService
from prefill_worker.prefill_service import PrefillService
from rpc import worker_pb2_grpc
from worker.base import Worker
from worker.runtime import WorkerRuntime, now


class PrefillWorker(Worker):
    def __init__(self, settings: WorkerSettings, runtime: WorkerRuntime | None = None) -> None:
        """`runtime`: of a worker that has another role too."""
        super().__init__(runtime or WorkerRuntime(settings))
        lease_seconds = settings.config.kv_transfer.lease_seconds
        self.leases = LeaseTable(lease_seconds=lease_seconds, clock=now, unpin=self._unpin)
        self._sweep_seconds = min(1.0, lease_seconds / 4)
        self._sweeper: asyncio.Task[None] | None = None

    def add_services(self) -> None:
        server = self.runtime.server
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillService(self.runtime, self.leases), server
        )
        add_kv_service(KvService(self.runtime, self.leases), server)
        self._sweeper = asyncio.create_task(self._sweep(), name="lease sweep")

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().stop(grace_s)
        self.leases.fail_all(UnavailableError(f"{self.runtime.settings.worker_id} has stopped"))

    def _unpin(self, request_id: str, error: PdserveError | None) -> None:
        if error is None:
            self.runtime.engine_loop.call(lambda engine: engine.release(request_id))
        else:
            self.runtime.abort(request_id)
            self.runtime.outputs.fail(request_id, error)

    async def _sweep(self) -> None:
        while True:  # on a clock: leases must end when nothing else happens
            await asyncio.sleep(self._sweep_seconds)
            self.leases.sweep()
