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
from typer.testing import CliRunner

from cli.main import app
from cli.state import running_deployments
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


def test_the_next_up_goes_on_with_it_and_down_ends_it(
    ray_running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + bytes(60))
    http, grpc, address = free_port(), free_port(), ray.get_runtime_context().gcs_address
    config = tmp_path / "test.yaml"
    config.write_text(
        f"model: {tmp_path / 'tiny.gguf'}\nray: {{address: '{address}'}}\n"
        f"router: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}'}}\n"
    )
    with ExitStack() as stack:
        first = Terminal(config, stack)
        workers = first.until_ready()
        assert set(workers) == {"prefill-0", "decode-0"}
        first.process.kill()
        first.process.wait(10)
        assert all(psutil.pid_exists(pid) for pid in workers.values())

        text = config.read_text()
        config.write_text(text + "pools: {prefill: {replicas: 2}}\n")
        second = Terminal(config, stack)
        assert second.until_ready() == workers
        assert "The deployment runs already" in second.said()
        assert "the file differs in pools.prefill.replicas" in second.said()
        second.process.kill()
        second.process.wait(10)

        (deployment,) = running_deployments()
        assert deployment.ray == address
        result = CliRunner().invoke(app, ["down"])
        assert result.exit_code == 0, result.output
        assert "Stopped" in result.stdout
        assert not running_deployments()
        prefix = f"pdserve:127.0.0.1-{http}"
        wait_until(lambda: not [
            name
            for name in (
                *(a["name"] for a in list_named_actors(all_namespaces=True)),
                *(g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"),
            )
            if name.startswith(prefix)
        ], 30, "nothing left in Ray")  # fmt: skip
        wait_until(lambda: not any(map(psutil.pid_exists, workers.values())), 30, "workers gone")
