"""The controller on a real local Ray, with workers that have no engine."""

import asyncio
import os
import signal

import psutil
import pytest
from control import PATIENCE_S, controlled, is_ready, view_where
from ray.exceptions import RayActorError, RayTaskError

from cluster.backoff import Backoff
from cluster.worker_slot import _why_dead
from core.config import parse_config
from core.errors import UnavailableError
from rpc import cluster_pb2, cluster_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.channel import make_channel

CONFIG = "model: none\n"


async def test_one_prefill_and_one_decode_worker_are_published(ray_running, tmp_path):
    async with controlled(parse_config(CONFIG), tmp_path) as controller:
        await controller.wait_ready()
        async with make_channel(controller.address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            views = [stub.Watch(cluster_pb2.WatchRequest(router_id=str(i))) for i in range(2)]
            for stream in views:
                view = await stream.read()
                assert {w.id: w.role for w in view.workers} == {
                    "prefill-0": pb.ROLE_PREFILL,
                    "decode-0": pb.ROLE_DECODE,
                }
                assert all(is_ready(w) for w in view.workers)
                assert all(w.incarnation and w.address and psutil.pid_exists(w.pid)
                           for w in view.workers)  # fmt: skip
            assert not controller.shutdown_requested.is_set()
            shutdown = asyncio.create_task(_answer(stub.Shutdown(cluster_pb2.ShutdownRequest())))
            await controller.shutdown_requested.wait()
            assert (await views[0].read()).is_ending
            assert not shutdown.done()
            await controller.stop(grace_s=1.0)
            await shutdown
        pids = [worker.pid for worker in view.workers]
        assert not controller.publisher.view().workers
        await gone(pids)
    assert "hello from prefill-0" in (tmp_path / "prefill-0.log").read_text()


async def _answer(call):
    return await call


async def gone(pids: list[int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(
            psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
            for p in pids
        ):
            await asyncio.sleep(0.05)


async def test_a_killed_worker_is_replaced_by_a_new_incarnation(ray_running, tmp_path):
    async with controlled(parse_config(CONFIG), tmp_path) as controller:
        await controller.wait_ready()
        before = await view_where(controller, lambda w: all(map(is_ready, w.values())))
        version = controller.publisher.view().version
        os.kill(before["prefill-0"].pid, signal.SIGKILL)
        seen_dead = await view_where(
            controller, lambda w: w["prefill-0"].state != pb.WORKER_STATE_READY
        )
        assert seen_dead["decode-0"] == before["decode-0"]
        after = await view_where(controller, lambda w: is_ready(w["prefill-0"]))
        assert after["prefill-0"].incarnation != before["prefill-0"].incarnation
        assert after["prefill-0"].pid != before["prefill-0"].pid
        assert after["decode-0"] == before["decode-0"]
        assert controller.publisher.view().version > version


async def test_a_worker_whose_engine_failed_is_replaced(ray_running, tmp_path):
    async with controlled(
        parse_config(CONFIG), tmp_path, prefill="FailingWorker", backoff=Backoff(first_s=0.1)
    ) as controller:
        dead = await view_where(controller, lambda w: w["prefill-0"].state == pb.WORKER_STATE_DEAD)
        assert "the engine exploded" in dead["prefill-0"].detail
        await view_where(controller, lambda w: is_ready(w["prefill-0"]))


async def test_a_crash_loop_is_bounded_and_said(ray_running, tmp_path):
    backoff = Backoff(first_s=0.01, longest_s=60.0, loop_deaths=2)
    async with controlled(
        parse_config(CONFIG), tmp_path, prefill="CrashingWorker", backoff=backoff
    ) as controller:
        with pytest.raises(UnavailableError, match="prefill-0: .+"):
            await controller.wait_ready()
        dead = await view_where(controller, lambda w: w["prefill-0"].state == pb.WORKER_STATE_DEAD)
        assert "starting again in 60.0 s" in dead["prefill-0"].detail


async def test_a_model_that_cannot_be_loaded_ends_the_wait_with_its_reason(ray_running, tmp_path):
    async with controlled(parse_config(CONFIG), tmp_path, prefill="ModellessWorker") as controller:
        with pytest.raises(UnavailableError, match="prefill-0: no such model: nothing"):
            await controller.wait_ready()


async def test_the_start_of_a_worker_needs_all_its_ranks_and_says_which_one_failed(
    ray_running, tmp_path
):
    text = CONFIG + "mode: colocated\npools: {colocated: {tensor_parallel_size: 3}}"
    async with controlled(parse_config(text), tmp_path, follower="LastRank") as controller:
        with pytest.raises(UnavailableError, match="colocated-0: no memory for rank 2"):
            await controller.wait_ready()
    assert (tmp_path / "colocated-0-rank2.log").exists()


async def test_placement_that_cannot_be_satisfied_names_what_is_missing(ray_running, tmp_path):
    """V57: one owner of reservations, and an error instead of a wait for ever."""
    config = parse_config(CONFIG + "pools: {prefill: {resources: {GPU: 64, unobtainium: 1}}}")
    async with controlled(config, tmp_path, placement_timeout_s=0.5) as controller:
        with pytest.raises(UnavailableError, match=r"prefill-0.*GPU 64 .*unobtainium 1 "):
            await controller.wait_ready()


async def test_a_colocated_pool_has_two_workers_with_their_share_of_threads(ray_running, tmp_path):
    config = parse_config(CONFIG + "mode: colocated\npools: {colocated: {replicas: 2}}")
    async with controlled(config, tmp_path) as controller:
        await controller.wait_ready()
        assert [w.role for w in controller.publisher.view().workers] == [pb.ROLE_COLOCATED] * 2


def test_the_reason_of_an_error_in_an_actor_is_the_end_of_its_traceback():
    trace = 'ray::Actor.start() (pid=1)\n  File "x.py", line 1, in f\nTypeError: what it was\n'
    error = RayTaskError("start", trace, TypeError("what it was"))
    assert _why_dead(error) == "TypeError: what it was"
    assert "killed" in _why_dead(RayActorError(error_msg="first\nThe actor was killed.\nlast"))
