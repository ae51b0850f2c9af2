"""Whoever asks a worker how it is gets an answer, whatever its engine is doing."""

import asyncio
import threading
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from support.pair import prompt, request, running_pair, tiny_config


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_probes_are_answered_during_a_long_step(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, pool: str
):
    """V46: no probe waits for the engine, and none of them says that the worker is not ready."""
    async with running_pair(tiny_config(tiny_model_dir)) as pair:
        entered, gate = threading.Event(), threading.Event()
        worker = getattr(pair, pool)
        model = worker.runtime.engine.model
        forward = model.forward

        def held_up(*arguments):
            entered.set()
            assert gate.wait(30)
            return forward(*arguments)

        monkeypatch.setattr(model, "forward", held_up)
        ask = pair.generate if pool == "prefill" else pair.alone
        task = asyncio.create_task(ask(request(prompt(20), max_tokens=3)))
        await asyncio.to_thread(entered.wait, 10)
        service = pair.stub(worker_pb2_grpc.WorkerServiceStub, worker)
        health = pair.stub(health_pb2_grpc.HealthStub, worker)
        statuses = service.WatchStatus(pb.WatchStatusRequest())
        for _ in range(4):
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            info = await service.GetInfo(pb.GetInfoRequest(), timeout=10)
            assert info.incarnation == worker.info.incarnation
            status = await asyncio.wait_for(statuses.read(), 10)
            assert status.state == pb.WORKER_STATE_READY
        # Only the time since the last step says that it is a long one.
        assert status.seconds_since_progress > 0 and not task.done()
        statuses.cancel()
        assert not worker.failed.done()  # which is what gets a worker replaced
        gate.set()
        assert len((await task).tokens) == 3
        await pair.wait_idle()
