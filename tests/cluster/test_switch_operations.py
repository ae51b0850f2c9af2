"""Workers that move between pools: asked for by a person, by a scaling, by the autoscalers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from control import controlled, is_ready, view_where
from test_operations import Operator, said

from cluster.autoscaler import Asked, Autoscaler, PoolLoad, WorkerLoad, decide_together
from cluster.changes import ChangeKind, changes_between
from cluster.role_switch import surplus_for_others
from core.config import AutoscaleConfig, parse_config
from core.errors import RequestError, UnavailableError
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc, worker_pb2
from rpc.channel import make_channel

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE
TEXT = """
model: none
served_model_name: {folder}
pools:
  prefill: {{replicas: 2, roles: [prefill, decode]}}
  decode: {{replicas: 1{more}}}
"""


@asynccontextmanager
async def operated(folder: Path, more: str = "") -> AsyncIterator[Operator]:
    config = parse_config(TEXT.format(folder=folder, more=more))
    async with (
        controlled(config, folder, settle_s=0.1) as controller,
        make_channel(controller.address) as channel,
    ):
        await controller.wait_ready()
        yield Operator(controller, folder, cluster_pb2_grpc.ClusterServiceStub(channel))


def entries(operator: Operator) -> dict[str, pb.WorkerEntry]:
    return {entry.id: entry for entry in operator.controller.publisher.view().workers}


async def switch(operator: Operator, worker_id: str, role: worker_pb2.Role) -> list[str]:
    request = pb.SwitchWorkerRequest(worker_id=worker_id, role=role)
    return await said(operator.stub.SwitchWorker(request))


async def test_a_worker_moves_with_its_process_and_a_new_incarnation(ray_running, tmp_path):
    async with operated(tmp_path) as operator:
        before = entries(operator)
        assert set(before) == {"worker-0", "worker-1", "decode-0"}
        operator.busy("worker-1", 1)
        moving = asyncio.create_task(switch(operator, "worker-1", DECODE))
        draining = await view_where(operator.controller, lambda w: not is_ready(w["worker-1"]))
        assert draining["worker-1"].state == worker_pb2.WORKER_STATE_DRAINING
        operator.busy("worker-1", 0)
        began, done = await moving
        assert began == "worker-1 becomes a decode worker"
        assert done.startswith("worker-1 is a decode worker after")
        after = entries(operator)
        moved, old = after["worker-1"], before["worker-1"]
        assert (moved.role, moved.pid, moved.address) == (DECODE, old.pid, old.address)
        assert is_ready(moved) and moved.incarnation != old.incarnation
        pools = operator.controller.config.pools
        assert (pools.prefill.replicas, pools.decode.replicas) == (1, 2)

        for worker_id, role, message in (
            ("worker-1", DECODE, "worker-1 is a decode worker already"),
            ("decode-0", PREFILL, "decode-0 cannot become a prefill worker: its pool has no"),
            ("worker-0", DECODE, "worker-0 is the last ready prefill worker"),
            ("worker-0", worker_pb2.ROLE_COLOCATED, "role: expected prefill or decode"),
        ):
            with pytest.raises(RequestError, match=message):
                await switch(operator, worker_id, role)

        # A scaling that takes here and gives there moves, too: nothing starts, nothing ends.
        texts = await operator.scale(prefill=2, decode=1)
        assert texts[0] == "worker-1 becomes a prefill worker" and len(texts) == 2
        assert {i: (e.pid, e.role) for i, e in entries(operator).items()} == {
            i: (e.pid, e.role) for i, e in before.items()
        }

        # One that cannot move stays, and what was wanted is done by a start and an end.
        (tmp_path / "worker-0-fault").write_text("stays")
        (tmp_path / "worker-1-fault").write_text("stays")
        with pytest.raises(UnavailableError, match="worker-0 stays a prefill worker: 1 sequences"):
            await switch(operator, "worker-0", DECODE)
        assert is_ready(entries(operator)["worker-0"])
        assert entries(operator)["worker-0"].incarnation == before["worker-0"].incarnation
        texts = await operator.scale(prefill=1, decode=2)
        assert "starting decode-1" in texts and "worker-1 is gone" in texts

        # One that dies on the way comes back as what it was.
        operator.controller.config = parse_config(TEXT.format(folder=tmp_path, more=""))
        await operator.scale(prefill=2, decode=1)
        (tmp_path / "worker-1-fault").write_text("dies")
        with pytest.raises(UnavailableError, match="worker-1 was lost"):
            await switch(operator, "worker-1", DECODE)
        back = await view_where(operator.controller, lambda w: is_ready(w["worker-1"]))
        assert back["worker-1"].role == PREFILL


async def test_a_pool_that_scales_itself_is_not_moved_by_hand(ray_running, tmp_path):
    async with operated(tmp_path, more=", autoscale: {max: 2}") as operator:
        with pytest.raises(RequestError, match="decode scales itself"):
            await switch(operator, "worker-0", DECODE)


def test_other_roles_are_a_rollout():
    old = parse_config(TEXT.format(folder="f", more=""))
    new = parse_config(TEXT.format(folder="f", more=", roles: [decode, prefill]"))
    (change,) = changes_between(old, new)
    assert (change.key, change.kind, change.pools) == (
        "pools.decode.roles", ChangeKind.ROLLOUT, ("decode",),
    )  # fmt: skip


@dataclass
class Slot:
    is_ready: bool = True
    is_able: bool = True

    def can_become(self, pool: str) -> bool:
        return self.is_ready and self.is_able


@pytest.mark.parametrize(
    ("prefill", "wanted", "count"),
    [
        ([Slot(), Slot(), Slot()], (1, 3), 2),
        ([Slot(), Slot(), Slot()], (1, 2), 1),
        ([Slot(), Slot(), Slot()], (0, 5), 3),
        ([Slot(), Slot(is_able=False), Slot()], (1, 9), 2),
        ([Slot(), Slot(is_able=False), Slot(is_able=False)], (1, 9), 1),
        # The ready one stays: the others are on their way, or were never to be.
        ([Slot(), Slot(is_ready=False), Slot(is_ready=False)], (1, 9), 0),
        ([Slot(is_able=False)] * 3, (1, 9), 0),
        ([Slot()] * 3, (3, 9), 0),
        ([Slot()] * 3, (1, 1), 0),
    ],
)
def test_as_many_move_as_one_pool_has_too_many_and_the_other_too_few(prefill, wanted, count):
    workers = {"prefill": prefill, "decode": [Slot(is_able=False)]}
    moves = surplus_for_others(workers, dict(zip(workers, wanted, strict=True)))
    assert moves == ([("prefill", "decode", count)] if count else [])


# ------------------------------------------------------------------ the autoscalers

IDLE = WorkerLoad(0, 0, 0, 0.0, 16, 1000.0, 0.02, 0.001)
BUSY = WorkerLoad(0, 400, 0, 0.0, 16, 1000.0, 0.02, 0.001)


class Two:
    """A prefill pool of 4 that has nothing to do, a decode pool of 2 that is full."""

    def __init__(self) -> None:
        bounds = AutoscaleConfig(min=1, max=8, ttft_p90=2.0)
        self.prefill, self.decode = Autoscaler(bounds, True, False), Autoscaler(bounds, False, True)

    def decide(self, now: float, movable: int, load: WorkerLoad = BUSY) -> dict[str, int]:
        asked = {
            "prefill": Asked(self.prefill, 4, PoolLoad([IDLE] * 4, 2.0)),
            "decode": Asked(self.decode, 2, PoolLoad([load] * 2, 2.0)),
        }
        changes = decide_together(now, asked, lambda source, target: movable)
        return {name: decision.replicas for name, decision in changes.items()}


def test_a_pool_that_grows_gets_what_the_other_has_idle():
    for movable, expected in ((3, {"decode": 4, "prefill": 2}), (1, {"decode": 4, "prefill": 3}),
                              (0, {"decode": 4})):  # fmt: skip
        two = Two()
        for look in range(11):
            assert two.decide(2.0 * look, movable, IDLE) == {}
        assert two.decide(22.0, movable) == expected


def test_a_pool_lends_nothing_before_it_has_seen_some_quiet_and_not_again_at_once():
    two = Two()
    assert two.decide(0.0, 3) == {"decode": 4}
    for at in (2.0, 8.0, 14.0):
        assert two.decide(at, 3) == {}
    assert two.decide(15.0, 3) == {"decode": 4}
    assert two.decide(30.0, 3) == {"decode": 4, "prefill": 2}
    assert two.prefill.spare(40.0, 4) == 0
    assert two.prefill.spare(50.0, 4) > 0
