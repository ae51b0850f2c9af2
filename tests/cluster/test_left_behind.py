"""`pdserve up` on a Ray of somebody else's: a killed one leaves a deployment that runs."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import ray
from ray.util import list_named_actors, placement_group_table
from test_controller_returns import controllers

from cli.state import deployment_name, running_deployments
from support.live import wait_until
from support.ports import free_port

CLI_TESTS = Path(__file__).parents[1] / "cli"
LIVES = re.compile(r"(\S+) is ready \(pid (\d+)\)")


class Terminal:
    """One `pdserve up` with a fake router and fake workers."""

    def __init__(self, config: Path, stack: ExitStack) -> None:
        paths = [str(CLI_TESTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self.output = stack.enter_context(config.with_suffix(".out").open("a+"))
        self.start = self.output.tell()
        self.process = subprocess.Popen(
            [sys.executable, str(CLI_TESTS / "up_with_fakes.py"), str(config)],
            stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        stack.callback(self.process.wait, 30)
        stack.callback(self.process.kill)

    def said(self) -> str:
        self.output.seek(self.start)
        return self.output.read()

    def until_ready(self) -> dict[str, int]:
        """Pids of the workers."""
        wait_until(
            lambda: "Ctrl-C stops it" in self.said() or self.process.poll() is not None, 120,
            "pdserve up",
        )  # fmt: skip
        assert self.process.poll() is None, self.said()
        return {name: int(pid) for name, pid in LIVES.findall(self.said())}


@pytest.fixture
def config(ray_running: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a deployment on the tests' Ray, on ports of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + bytes(60))
    address = ray.get_runtime_context().gcs_address
    config = tmp_path / "test.yaml"
    config.write_text(
        f"model: {tmp_path / 'tiny.gguf'}\nray: {{address: '{address}'}}\n"
        f"router: {{http: '127.0.0.1:{free_port()}', grpc: '127.0.0.1:{free_port()}'}}\n"
    )
    return config


IMPATIENT = """
from cli import control, down, main
control._SILENCE_S, down._ASK_S = 2.0, 1.0
main.main()
"""


def pdserve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, which does not wait for long."""
    return subprocess.run(
        [sys.executable, "-c", IMPATIENT, *arguments], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def down_and_nothing_left(workers: dict[str, int]) -> str:
    """What `pdserve down` says."""
    (deployment,) = running_deployments()
    result = pdserve("down")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not running_deployments()
    prefix = f"pdserve:{deployment_name(deployment.http)}"
    wait_until(lambda: not [
        name
        for name in (
            *(a["name"] for a in list_named_actors(all_namespaces=True)),
            *(g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"),
        )
        if name.startswith(prefix)
    ], 30, "nothing left in Ray")  # fmt: skip
    wait_until(lambda: not any(map(psutil.pid_exists, workers.values())), 30, "workers gone")
    return result.stdout


def test_the_next_up_goes_on_with_it_and_down_ends_it(config: Path):
    with ExitStack() as stack:
        first = Terminal(config, stack)
        workers = first.until_ready()
        assert set(workers) == {"prefill-0", "decode-0"}
        first.process.kill()
        first.process.wait(10)
        assert all(psutil.pid_exists(pid) for pid in workers.values())

        config.write_text(config.read_text() + "pools: {prefill: {replicas: 2}}\n")
        second = Terminal(config, stack)
        assert second.until_ready() == workers
        assert "The deployment runs already" in second.said()
        assert "the file differs in pools.prefill.replicas" in second.said()
        second.process.kill()
        second.process.wait(10)
        assert "Stopped" in down_and_nothing_left(workers)


def test_down_ends_one_whose_controller_answers_no_more(config: Path):
    """It hangs, and its watchdog too."""
    others = {process.pid for process in controllers()}
    with ExitStack() as stack:
        first = Terminal(config, stack)
        workers = first.until_ready()
        (controller,) = [process for process in controllers() if process.pid not in others]
        for process in (*controller.children(), controller):
            process.suspend()
        first.process.kill()
        first.process.wait(10)
        result = pdserve("scale", "prefill=2")
        assert result.returncode == 1
        assert "has not answered for 2 s; requests go on without it" in result.stderr
        said = down_and_nothing_left({**workers, "controller": controller.pid})
        assert "did not stop when asked, and was killed" in said
