"""What a pod's preStop runs: the workers of a host drain, one after the other."""

import asyncio
import threading

import pytest

from cli.control import Target, drain_host
from cli.terminal import Reporter
from core.errors import OverloadedError
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc
from rpc.channel import make_server
from rpc.status import translated_errors


class Controller(cluster_pb2_grpc.ClusterServiceServicer):
    """Is busy with something else at first; its replacement of a worker never gets ready."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.is_busy = True

    async def Watch(self, request, context):
        yield pb.ClusterView(workers=[
            pb.WorkerEntry(id="prefill-0", host="pod-a", address="192.0.2.1:5"),
            pb.WorkerEntry(id="decode-0", host="pod-b", address="192.0.2.2:5"),
            pb.WorkerEntry(id="prefill-1", host="pod-a", address="192.0.2.1:6"),
        ])  # fmt: skip

    async def DrainWorker(self, request, context):
        async with translated_errors(context):
            self.asked.append((request.worker_id, request.grace_seconds))
            if self.is_busy:
                self.is_busy = False
                raise OverloadedError("a rollout is under way")
            yield pb.OperationEvent(text=f"draining {request.worker_id}")
            yield pb.OperationEvent(text=f"{request.worker_id} is gone")
            await asyncio.sleep(3600)


@pytest.mark.parametrize("host", ["pod-a", "192.0.2.1"])
def test_all_workers_of_the_host_drain_and_nobody_waits_for_the_new_ones(host, monkeypatch):
    monkeypatch.setattr("cli.control._BUSY_S", 0.01)
    service, address = Controller(), []
    started, done = threading.Event(), threading.Event()

    async def serve() -> None:
        server = make_server()
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(service, server)
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        started.set()
        await asyncio.to_thread(done.wait, 60)
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        with Reporter() as reporter:
            drain_host(Target(address[0]), host, 7.0, reporter)
    finally:
        done.set()
        thread.join(30)
    assert service.asked == [("prefill-0", 7.0)] * 2 + [("prefill-1", 7.0)]
