"""Apply, scale, drain and rollout on a real local Ray, with workers that have no engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from control import controlled, is_ready, view_where

from cluster.controller import Controller
from cluster.operations import least_missed
from core.config import parse_config
from core.errors import NotFoundError, OverloadedError, RequestError, UnavailableError
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc, worker_pb2
from rpc.channel import make_channel
from rpc.status import error_from_rpc

DRAINING = worker_pb2.WORKER_STATE_DRAINING


class Operator:
    """A controller with 2 prefill workers, and what a person does to it, over gRPC."""

    def __init__(self, controller: Controller, folder: Path, stub) -> None:
        self.controller = controller
        self.folder = folder
        self.stub = stub

    @property
    def text(self) -> str:
        return config_text(self.folder)

    def busy(self, worker_id: str, num_requests: int) -> None:
        (self.folder / worker_id).write_text(str(num_requests))

    def pids(self) -> dict[str, int]:
        return {w.id: w.pid for w in self.controller.publisher.view().workers}

    async def scale(self, **replicas: int) -> list[str]:
        return await said(self.stub.Scale(pb.ScaleRequest(replicas=replicas)))

    async def drain(self, worker_id: str, **fields: float) -> list[str]:
        return await said(
            self.stub.DrainWorker(pb.DrainWorkerRequest(worker_id=worker_id, **fields))
        )

    async def apply(self, text: str) -> list[str]:
        return await said(self.stub.Apply(pb.ApplyRequest(config_yaml=text)))


def config_text(folder: Path) -> str:
    return f"model: none\nserved_model_name: {folder}\npools: {{prefill: {{replicas: 2}}}}\n"


async def said(call) -> list[str]:
    """What an operation says until it ends. Raises its error."""
    texts = []
    try:
        async for event in call:
            texts += [event.text] if event.text else []
    except Exception as error:
        raise error_from_rpc(error, "controller") from error  # type: ignore[arg-type]
    return texts


@asynccontextmanager
async def operated(tmp_path: Path) -> AsyncIterator[Operator]:
    config = parse_config(config_text(tmp_path))
    async with (
        controlled(config, tmp_path, settle_s=0.1) as controller,
        make_channel(controller.address) as channel,
    ):
        await controller.wait_ready()
        yield Operator(controller, tmp_path, cluster_pb2_grpc.ClusterServiceStub(channel))


async def test_scaling_up_waits_for_ready_and_down_takes_the_idle_one(ray_running, tmp_path):
    """V61: the idle worker goes, the busy one is not touched."""
    async with operated(tmp_path) as operator:
        before = operator.pids()
        texts = await operator.scale(prefill=3)
        assert texts == ["starting prefill-2", "prefill-2 is ready"]
        assert set(operator.pids()) == {*before, "prefill-2"}
        operator.busy("prefill-0", 4)
        operator.busy("prefill-2", 1)
        texts = await operator.scale(prefill=2)
        assert texts == ["draining prefill-1", "prefill-1 is gone"]
        assert set(operator.pids()) == {"prefill-0", "prefill-2", "decode-0"}
        assert "stopped in order" in (tmp_path / "prefill-1.log").read_text()
        assert operator.controller.config.pools.prefill.replicas == 2
        with pytest.raises(RequestError, match="no pool 'colocated'; there is prefill and decode"):
            await operator.scale(colocated=1)
        operator.busy("prefill-0", 0)
        operator.busy("prefill-2", 0)


async def test_a_drained_worker_ends_what_runs_there_and_is_replaced(ray_running, tmp_path):
    """V63: nothing new from the first moment, the process only when nothing runs."""
    async with operated(tmp_path) as operator:
        before = operator.pids()
        operator.busy("prefill-1", 1)
        draining = asyncio.create_task(operator.drain("prefill-1"))
        await view_where(operator.controller, lambda w: w["prefill-1"].state == DRAINING)
        with pytest.raises(OverloadedError, match="a drain of prefill-1 is under way"):
            await operator.scale(prefill=1)
        await asyncio.sleep(0.2)
        assert operator.pids()["prefill-1"] == before["prefill-1"]
        assert not draining.done()
        operator.busy("prefill-1", 0)
        texts = await draining
        assert texts == ["draining prefill-1", "prefill-1 is gone", "starting prefill-1",
                         "prefill-1 is ready"]  # fmt: skip
        after = operator.pids()
        assert after["prefill-1"] != before["prefill-1"]
        assert {**after, "prefill-1": 0} == {**before, "prefill-1": 0}
        with pytest.raises(NotFoundError, match="no worker 'prefill-7'"):
            await operator.drain("prefill-7")


async def test_the_last_worker_of_a_pool_goes_when_the_new_one_is_there(ray_running, tmp_path):
    async with operated(tmp_path) as operator:
        operator.busy("decode-0", 1)  # for longer than the grace
        texts = await operator.drain("decode-0", grace_seconds=0.1)
        assert texts == ["starting decode-1", "decode-1 is ready",
                         "decode-0 is gone; what still ran there is resumed elsewhere"]  # fmt: skip


async def test_a_changed_file_is_shown_then_rolled_out_one_by_one(ray_running, tmp_path):
    async with operated(tmp_path) as operator:
        before = operator.pids()
        text = operator.text.replace("replicas: 2", "replicas: 1, engine: {max_num_seqs: 7}")
        dry = operator.stub.Apply(pb.ApplyRequest(config_yaml=text, dry_run=True))
        (event,) = [event async for event in dry]
        assert [(c.key, c.before, c.after, c.kind) for c in event.changes] == [
            ("pools.prefill.engine.max_num_seqs", "null", "7", pb.CHANGE_KIND_ROLLOUT),
            ("pools.prefill.replicas", "2", "1", pb.CHANGE_KIND_SCALE),
        ]
        assert operator.pids() == before

        least_ready = 99

        async def watch() -> None:
            nonlocal least_ready
            async for view in operator.controller.publisher.watch():
                ready = [w for w in view.workers if w.id.startswith("prefill") and is_ready(w)]
                least_ready = min(least_ready, len(ready))

        watching = asyncio.create_task(watch())
        await operator.apply(text.replace("replicas: 1", "replicas: 2"))
        watching.cancel()
        assert least_ready == 2  # V62: an old one goes when the new one is ready
        after = operator.pids()
        assert after["decode-0"] == before["decode-0"]
        assert not set(after.values()) & {before["prefill-0"], before["prefill-1"]}
        assert operator.controller.config.engine_for("prefill").max_num_seqs == 7
        assert len([w for w in after if w.startswith("prefill")]) == 2


async def test_a_rollout_that_is_not_healthy_leaves_all_as_it_was(ray_running, tmp_path):
    """V62: the old workers stay until the new ones are truly ready."""
    async with operated(tmp_path) as operator:
        before = operator.pids()
        text = operator.text + "engine: {max_num_seqs: 13}\n"
        with pytest.raises(UnavailableError, match="rolled back.*not with this setting"):
            await operator.apply(text)
        assert operator.pids() == before
        assert operator.controller.config.engine_for("prefill").max_num_seqs == 64
        with pytest.raises(RequestError, match=r"while the deployment runs: dtype \(auto -> float"):
            await operator.apply(operator.text + "dtype: float32\n")
        assert operator.pids() == before


async def test_without_room_for_one_more_the_old_one_goes_first(ray_running, tmp_path):
    """V62: a cluster that is full can be rolled, and rolled back."""
    async with operated(tmp_path) as operator:
        before = operator.pids()

        async def no_room(pool, config) -> bool:
            return False

        operator.controller.has_room = no_room  # type: ignore[method-assign]
        texts = await said(operator.stub.Rollout(pb.RolloutRequest(pools=["decode"])))
        assert texts == ["no room for one more: draining decode-0 first", "decode-0 is gone",
                         "starting decode-0", "decode-0 is ready"]  # fmt: skip
        assert operator.pids()["decode-0"] != before["decode-0"]
        with pytest.raises(UnavailableError, match="rolled back"):
            await operator.apply(operator.text + "engine: {max_num_seqs: 13}\n")
        workers = operator.controller.publisher.view().workers
        assert len(workers) == 3 and all(map(is_ready, workers))
        assert operator.controller.config.engine_for("prefill").max_num_seqs == 64


async def test_a_size_that_does_not_fit_is_refused_and_not_wanted_any_more(
    ray_running, tmp_path, monkeypatch
):
    async with operated(tmp_path) as operator:
        weights = operator.controller._model_path = tmp_path / "weights.gguf"
        weights.write_bytes(b"GGUF")
        monkeypatch.setattr("cluster.controller.available_memory", lambda: 1 << 20)
        with pytest.raises(RequestError, match="too little memory for 1 more worker"):
            await operator.scale(prefill=5)
        assert operator.controller.config.pools.prefill.replicas == 2
        assert len(operator.pids()) == 3


@dataclass
class Slot:
    id: str
    is_ready: bool
    load: int

    async def num_requests(self) -> int:
        return self.load


async def test_those_that_start_go_first_then_the_idle_then_the_youngest():
    """V61: no running worker goes for one that only starts."""
    slots = [Slot("a", True, 3), Slot("b", False, 0), Slot("c", True, 0), Slot("d", True, 0)]
    order = [slot.id for slot in await least_missed(slots, 4)]  # type: ignore[arg-type]
    assert order == ["b", "d", "c", "a"]
    assert await least_missed(slots, 0) == []  # type: ignore[arg-type]
    assert await least_missed(slots, -1) == []  # type: ignore[arg-type]
