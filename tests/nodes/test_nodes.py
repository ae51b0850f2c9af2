"""One deployment on a Ray cluster of several nodes: a node is killed, a worker drained, a node
added, the head lost and found again, all under streams that must not notice.

`make test-nodes`. Everything goes through the command and the router, as a user would have it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from support.byte_model import save_byte_model
from support.live import PDSERVE, Live, deployment, shm_files, wait_until
from support.ray_nodes import Nodes, ray_nodes
from support.sse import is_done, stream_body

pytestmark = pytest.mark.slow

HEAD_AWAY_S = 75  # Ray's own patience is 60
CONTROL = "127.0.0.2"
# `pdserve` as on the machine of that address: Ray has it connect to the node there.
ON_CONTROL = f"""
from cluster import ray_session
ray_session._INIT_OPTIONS["_node_ip_address"] = "{CONTROL}"
from cli.main import main
main()
"""
PATIENCE_S = 120.0  # a bound for a busy machine, not a measure
PROMPTS = [f"Stream {number} says: {'la ' * (10 * number + 3)}" for number in range(4)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd-nodes-", dir="/tmp"))  # short: sockets go below it
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[Nodes]:
    """At the end no shared memory is left of them, nor of workers that were killed."""
    before = shm_files()
    with ray_nodes(folder) as nodes:
        yield nodes
    assert shm_files() <= before


@pytest.fixture(scope="module")
def by_name(nodes: Nodes) -> dict[str, Any]:
    """2 nodes for prefill, 2 for decode, and one for the controller, which is not the head."""
    pools = {f"{pool}-{n}": nodes.add(pool) for pool in ("prefill", "decode") for n in range(2)}
    return {**pools, "control": nodes.add_control(CONTROL)}


@pytest.fixture(scope="module")
def live(nodes: Nodes, by_name: dict[str, Any], folder: Path) -> Iterator[Live]:
    model = save_byte_model(folder / "model", max_model_len=4096)
    config = {
        "model": str(model),
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"num_kv_blocks": 2048, "max_num_seqs": 8},
        "pools": {
            "prefill": {"replicas": 2, "label_selector": {"pool": "prefill"}},
            "decode": {
                "replicas": 2,
                "resources": {"decode": 1},
                "runtime_env": {"env_vars": {"PDSERVE_TEST": "of decode alone"}},
            },
        },
        "ray": {"address": nodes.address},
    }
    path = folder / "nodes.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        command = [sys.executable, "-c", ON_CONTROL]
        log = folder / "up.log"
        with deployment(str(path), log, timeout_s=PATIENCE_S, command=command) as live:
            yield live


def pdserve(*arguments: str) -> str:
    done = subprocess.run(
        [str(PDSERVE), *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stream(live: Live, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 800, "temperature": 0,
            "stream": True, "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert is_done(answer.text), answer.text[-500:]
    text, reason = stream_body(answer.text)
    assert reason == "length"
    return text


class Load:
    """Streams one after the other, for each prompt, whose texts must be the undisturbed ones."""

    def __init__(self, live: Live, expected: list[str]) -> None:
        self._live, self._expected = live, expected
        self._over = threading.Event()
        self.finished = [0] * len(PROMPTS)
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(len(PROMPTS))]

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                text = stream(self._live, PROMPTS[number])
            except Exception as error:
                self.wrong.append(f"stream {number}: {error!r}")
                return
            if text != self._expected[number]:
                self.wrong.append(f"stream {number} differs")
            self.finished[number] += 1

    def wait_for_more(self) -> None:
        """Until each stream that runs now has ended, and one after it."""
        target = [count + 2 for count in self.finished]

        def is_there() -> bool:
            assert not self.wrong, self.wrong
            return all(n >= wanted for n, wanted in zip(self.finished, target, strict=True))

        wait_until(is_there, PATIENCE_S, f"more streams than {self.finished}")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.wrong, self.wrong


@pytest.fixture(scope="module")
def undisturbed(live: Live) -> list[str]:
    return [stream(live, prompt) for prompt in PROMPTS]


@contextmanager
def load(live: Live, expected: list[str]) -> Iterator[Load]:
    running = Load(live, expected)
    running.start()
    try:
        running.wait_for_more()
        yield running
    finally:
        running.stop()


def ready(live: Live) -> dict[str, str]:
    """Incarnations of the workers that are ready."""
    return {w["id"]: w["incarnation"] for w in live.workers() if w["state"] == "ready"}


def wait_for_pools(live: Live) -> None:
    wanted = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    wait_until(lambda: ready(live).keys() == wanted, PATIENCE_S, f"the wanted pools: {live.view()}")


def test_each_pool_is_where_its_selector_says(live: Live, by_name: dict[str, Any]) -> None:
    """V57: the nodes have exactly what the workers need, and one of each place is taken once."""
    raylets = {
        node.all_processes["raylet"][0].process.pid: name.partition("-")[0]
        for name, node in by_name.items()
    }
    raylets.pop(by_name["control"].all_processes["raylet"][0].process.pid)
    hosts = []
    for worker in live.workers():
        process = psutil.Process(worker["pid"])
        hosts.append(process.ppid())
        assert raylets[process.ppid()] == worker["role"]
        # Of the process's start: what Ray sets for a runtime_env.
        has_it = process.environ().get("PDSERVE_TEST") == "of decode alone"
        assert has_it == (worker["role"] == "decode")
    assert sorted(hosts) == sorted(raylets)  # one each


@pytest.mark.parametrize("pool", ["decode", "prefill"])
def test_a_node_killed_and_one_added_under_load(
    live: Live, nodes: Nodes, by_name: dict[str, Any], undisturbed: list[str], pool: str
) -> None:
    wait_for_pools(live)
    before = ready(live)
    with load(live, undisturbed) as running:
        nodes.kill(by_name.pop(f"{pool}-1"))
        wait_until(lambda: len(ready(live)) == 3, PATIENCE_S, "the loss to be seen")
        running.wait_for_more()
        by_name[f"{pool}-1"] = nodes.add(pool)
        wait_for_pools(live)
        running.wait_for_more()
    after = ready(live)
    assert len([name for name in before if before[name] != after[name]]) == 1
    live.wait_idle()


def test_a_drained_worker_under_load(live: Live, undisturbed: list[str]) -> None:
    """V63: on P with KV held for a decode worker, and on D in the middle of streams."""
    wait_for_pools(live)
    before = ready(live)
    with load(live, undisturbed) as running:
        for worker in ("prefill-0", "decode-1"):
            assert f"{worker} is ready" in pdserve("drain", worker)
            running.wait_for_more()
    after = ready(live)
    assert {n for n in before if before[n] != after.get(n)} == {"prefill-0", "decode-1"}
    live.wait_idle()


def test_a_rolling_update_under_load(live: Live, undisturbed: list[str]) -> None:
    """V62, V63: no node is left for one worker more, so each goes before the next one comes; no
    request fails."""
    wait_for_pools(live)
    before = ready(live)
    with load(live, undisturbed) as running:
        said = pdserve("rollout")
        running.wait_for_more()
    assert "no room for one more" in said
    assert not set(before.values()) & set(ready(live).values())
    live.wait_idle()


def test_losing_the_controllers_node_under_load(
    live: Live, nodes: Nodes, by_name: dict[str, Any], undisturbed: list[str], folder: Path
) -> None:
    """V59: with its disk. The controller comes back on another node, at another address, to the
    same workers and to what was wanted of them; router and commands find it there."""
    wait_for_pools(live)
    pdserve("scale", "decode=1")
    before, address = ready(live), live.view()["controller"]
    with load(live, undisturbed) as running:
        nodes.kill(by_name.pop("control"))
        (wanted,) = (folder / "state").glob("pdserve/wanted/*.json")
        wanted.unlink()
        wait_until(lambda: "it is at " in live.log.read_text(), PATIENCE_S, "the controller")
        running.wait_for_more()
        assert live.view()["controller"] != address
        assert ready(live) == before
        assert "is ready" in pdserve("scale", "decode=2")
        wait_for_pools(live)
        running.wait_for_more()
    assert before.items() <= ready(live).items()
    live.wait_idle()


def test_losing_the_head_stops_no_stream_and_the_pools_are_kept_when_it_is_back(
    live: Live, nodes: Nodes, undisturbed: list[str]
) -> None:
    """V59: no stream fails, no worker restarts, and what the controller does goes on afterwards."""
    wait_for_pools(live)
    before = ready(live)
    with load(live, undisturbed) as running:
        nodes.kill_head()
        end = time.monotonic() + HEAD_AWAY_S
        while time.monotonic() < end:
            running.wait_for_more()  # those that ran, and new ones
            assert ready(live) == before
        nodes.start_head()
        running.wait_for_more()
        assert ready(live) == before
        victim = next(w for w in live.workers("decode") if w["id"] == "decode-0")
        os.kill(victim["pid"], 9)
        wait_until(lambda: ready(live).get("decode-0") not in (None, before["decode-0"]),
                   PATIENCE_S, "a fresh worker by the new head")  # fmt: skip
        assert "is gone" in pdserve("scale", "decode=1")
        pdserve("scale", "decode=2")
        wait_for_pools(live)
        running.wait_for_more()
    live.wait_idle()
