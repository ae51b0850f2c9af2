"""The controller as an actor: it dies, Ray starts it again, and it finds what it has left."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from control import PATIENCE_S, is_ready
from ray.util import list_named_actors, placement_group_table
from test_operations import DRAINING, config_text, said

from cluster.actor_process import node_address
from cluster.attach import attach, end_deployment
from cluster.controller import Controller
from cluster.controller_actor import ControllerSpec
from cluster.controller_client import ControllerClient
from cluster.lives import find_lives
from cluster.wanted import Wanted, WantedFile
from cluster.worker_slot import SlotOptions
from core.config import parse_config
from core.errors import UnavailableError
from rpc import cluster_pb2 as pb

NAME = "returns"


def controllers() -> list[psutil.Process]:
    """Of every deployment that this process has started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name().startswith("ray::ControllerA")]


class Deployed:
    """A controller actor, with 2 prefill workers and a decode worker that have no engine."""

    def __init__(
        self, spec: ControllerSpec, client: ControllerClient, folder: Path, others: set[int]
    ) -> None:
        self.spec = spec
        self.others = others  # controllers that were there before
        self.client = client
        self.stub = client._stub
        self.folder = folder

    def process(self) -> psutil.Process:
        (found,) = [process for process in controllers() if process.pid not in self.others]
        return found

    def busy(self, worker_id: str, num_requests: int) -> None:
        (self.folder / worker_id).write_text(str(num_requests))

    async def killed(self) -> None:
        """Until Ray has noticed, so that the next view is of the next process."""
        process = self.process()
        process.kill()
        async with asyncio.timeout(PATIENCE_S):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)

    async def view_where(
        self, condition: Callable[[dict[str, pb.WorkerEntry]], bool]
    ) -> dict[str, pb.WorkerEntry]:
        async with asyncio.timeout(PATIENCE_S), aclosing(self.client.views()) as views:
            async for view in views:
                workers = {worker.id: worker for worker in view.workers} if view else {}
                if view and condition(workers):
                    return workers
        raise AssertionError("the views never end")

    async def all_ready(self, num_workers: int = 3) -> dict[str, pb.WorkerEntry]:
        return await self.view_where(
            lambda w: len(w) == num_workers and all(map(is_ready, w.values()))
        )


def spec_for(folder: Path, **options: object) -> ControllerSpec:
    roles = ("prefill", "decode")
    return ControllerSpec(
        config=parse_config(config_text(folder)),
        options=SlotOptions(
            deployment=NAME,
            log_dir=str(folder),
            worker_classes=dict.fromkeys(roles, "fake_worker:FakeWorker"),
            **options,  # type: ignore[arg-type]
        ),
        host="127.0.0.1",
        port=0,
        node=node_address(),
        log_dir=folder,
        wanted_path=folder / "wanted.json",
        cluster_token="",
    )


@asynccontextmanager
async def deployed(folder: Path, **options: object) -> AsyncIterator[Deployed]:
    """On the way out nothing is left of it."""
    spec = spec_for(folder, **options)
    others = {process.pid for process in controllers()}
    facts, is_found = await asyncio.to_thread(attach, spec)
    assert not is_found
    try:
        async with ControllerClient(facts.address) as client:
            await client.wait_ready()
            yield Deployed(spec, client, folder, others)
            assert await client.shutdown(PATIENCE_S)
        await nothing_left(facts.address)
    finally:
        await asyncio.to_thread(end_deployment, NAME)


async def nothing_left(address: str) -> None:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        while left():  # a group is given back a moment after it was asked for
            await asyncio.sleep(0.05)
        while is_listening(host, int(port)):  # a process ends a moment after its name
            await asyncio.sleep(0.05)


def is_listening(host: str, port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


def left() -> list[str]:
    actors = [entry["name"] for entry in list_named_actors(all_namespaces=True)]
    groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return [name for name in actors + groups if name.startswith(f"pdserve:{NAME}")]


async def test_a_killed_controller_finds_its_workers_and_what_was_wanted_of_them(
    ray_running, tmp_path
):
    async with deployed(tmp_path) as deployment:
        before = await deployment.all_ready()
        texts = await said(deployment.stub.Scale(pb.ScaleRequest(replicas={"prefill": 3})))
        assert texts[-1] == "prefill-2 is ready"
        before = await deployment.all_ready(4)
        first = deployment.process()

        async with aclosing(deployment.client.views()) as views:
            await anext(views)
            await deployment.killed()
            async with asyncio.timeout(PATIENCE_S):
                while (view := await anext(views)) is not None:
                    pass
                view = await anext(views)
        # Its first word at once, not after a moment in which they are missing.
        assert {w.id: w for w in view.workers} == before
        assert deployment.process() != first

        facts, is_found = await asyncio.to_thread(attach, spec_for(tmp_path))
        assert is_found  # by a second `pdserve up`, too
        assert facts.address == deployment.client.address
        assert facts.config.pools.prefill.replicas == 3
        texts = await said(deployment.stub.Scale(pb.ScaleRequest(replicas={"prefill": 1})))
        assert sorted(texts)[-2:] == ["prefill-1 is gone", "prefill-2 is gone"]
        after = await deployment.all_ready(2)
        assert after == {name: before[name] for name in ("prefill-0", "decode-0")}
        log = (tmp_path / "controller.log").read_text()
        assert "found prefill-0 again" in log and "removing" not in log


async def test_a_worker_that_died_meanwhile_is_replaced(ray_running, tmp_path):
    async with deployed(tmp_path) as deployment:
        before = await deployment.all_ready()
        deployment.process().suspend()  # away, and sees nothing
        os.kill(before["prefill-1"].pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while sum("prefill-1" in name for name in left()) > 1:  # the group alone
                await asyncio.sleep(0.05)
        await deployment.killed()
        after = await deployment.view_where(
            lambda w: (
                len(w) == 3
                and all(map(is_ready, w.values()))
                and w["prefill-1"].incarnation != before["prefill-1"].incarnation
            )
        )
        assert {**after, "prefill-1": None} == {**before, "prefill-1": None}
        assert (
            "removing what is left of pdserve:returns:prefill-1:"
            in (tmp_path / "controller.log").read_text()
        )


async def test_a_rollout_that_was_cut_short_is_taken_back(ray_running, tmp_path):
    async with deployed(tmp_path, settle_s=PATIENCE_S) as deployment:
        before = await deployment.all_ready()
        text = config_text(tmp_path) + "engine: {max_num_seqs: 7}\n"
        applying = asyncio.create_task(
            said(deployment.stub.Apply(pb.ApplyRequest(config_yaml=text)))
        )
        await deployment.all_ready(4)  # decode-1 is on trial
        await deployment.killed()
        with pytest.raises(UnavailableError):
            await applying
        after = await deployment.view_where(lambda w: "decode-1" not in w)
        assert after == before


async def test_a_worker_that_drains_goes_on_draining(ray_running, tmp_path):
    async with deployed(tmp_path) as deployment:
        before = await deployment.all_ready()
        deployment.busy("prefill-0", 1)
        draining = asyncio.create_task(
            said(deployment.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="prefill-0")))
        )
        async with asyncio.timeout(PATIENCE_S):
            while not any(life.is_draining for life in await find_lives(NAME)):
                await asyncio.sleep(0.05)
        await deployment.killed()
        with pytest.raises(UnavailableError):
            await draining
        # A fresh one takes its place, as was wanted.
        during = await deployment.view_where(
            lambda w: (
                w["prefill-0"].state == DRAINING and "prefill-2" in w and is_ready(w["prefill-2"])
            )
        )
        assert during["prefill-0"].pid == before["prefill-0"].pid
        deployment.busy("prefill-0", 0)
        after = await deployment.view_where(lambda w: "prefill-0" not in w)
        assert {after[name].pid for name in ("prefill-1", "decode-0")} == {
            before[name].pid for name in ("prefill-1", "decode-0")
        }


async def test_all_can_be_ended_without_being_asked(ray_running, tmp_path):
    """As `pdserve down` does when the controller does not answer."""
    facts, _ = await asyncio.to_thread(attach, spec_for(tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        while len(left()) < 7:  # the controller, and two of each worker
            await asyncio.sleep(0.05)
    await asyncio.to_thread(end_deployment, NAME)
    await nothing_left(facts.address)


async def test_a_port_that_is_taken_is_one_clear_error(ray_running, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        spec = ControllerSpec(**{
            **{f: getattr(spec_for(tmp_path), f) for f in ControllerSpec.__slots__},
            "port": server.getsockname()[1],
        })  # fmt: skip
        with pytest.raises(UnavailableError, match=r"the controller cannot bind 127\.0\.0\.1:"):
            await asyncio.to_thread(attach, spec)
    async with asyncio.timeout(PATIENCE_S):
        while left():
            await asyncio.sleep(0.05)


async def test_one_that_died_as_it_was_ending_starts_nothing_again(ray_running, tmp_path):
    spec = spec_for(tmp_path)
    file = WantedFile(spec.wanted_path)
    file.save(Wanted("it", spec.config, "127.0.0.1:0", "127.0.0.1", is_ending=True))
    controller = Controller(spec.config, spec.options, wanted_file=file, controller_id="it")
    try:
        await controller.start()
        assert controller.has_come_back
        assert controller.shutdown_requested.is_set()
        assert not controller.publisher.view().workers
    finally:
        await controller.stop(1.0)


def test_the_wanted_state_is_whole_and_of_one_controller(tmp_path):
    file = WantedFile(tmp_path / "below" / "wanted.json")
    assert file.load("a") is None
    text = "model: m\nmode: colocated\npools: {colocated: {replicas: 3, resources: {GPU: 1}}}"
    wanted = Wanted("a", parse_config(text), "127.0.0.1:1234", "127.0.0.1", version=3)
    file.save(wanted)
    assert file.load("a") == wanted
    assert file.load("b") is None
    assert file.path.stat().st_mode & 0o077 == 0
    file.path.write_text("half a fi")
    assert file.load("a") is None
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=r"cannot write .*file/wanted\.json"):
        WantedFile(tmp_path / "file" / "wanted.json").save(wanted)
