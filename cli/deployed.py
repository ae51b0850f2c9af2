"""A deployment that another command runs for a while: `pdserve up` as a process of its own.

`python -m cluster.tied_child PID cli up ...` is `pdserve up ...`, and ends when the process PID
does, however that dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from cli.state import running_deployments
from core.errors import UnavailableError

START_TIMEOUT_S = 600.0  # a large model takes minutes to load
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1


class Deployed:
    """A running deployment, seen by its HTTP address."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self.url = ""

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every worker is ready and the router serves. Raises UnavailableError with the
        last line of its output if it ends before, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if self._process.poll() is not None:
                raise UnavailableError(f"the deployment did not start: {self._last_line()}")
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the deployment was not ready within {timeout_s:g} s: {self._last_line()}"
                )
            time.sleep(_POLL_S)

    def cluster(self) -> dict[str, Any]:
        return dict(self._get("/cluster").json())

    def metrics(self) -> str:
        return self._get("/metrics").text

    def stop(self) -> None:
        """Ends it in order; kills what is left of its process group if that fails."""
        if self._process.poll() is None:
            # Not SIGINT, which a shell in the background may have taught us all to ignore.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _is_ready(self) -> bool:
        if not self.url:
            own = [d for d in running_deployments() if d.pid == self._process.pid]
            self.url = own[0].url if own else ""
            return False
        try:
            self._get("/ready")
            return all(worker["state"] == "ready" for worker in self.cluster()["workers"])
        except UnavailableError:
            return False

    def _get(self, path: str) -> httpx.Response:
        try:
            response = httpx.get(f"{self.url}{path}", timeout=10.0, trust_env=False)
            return response.raise_for_status()
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url}{path}: {error}") from error

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip() and line.strip() != "stopped"]
        return f"{said[-1].strip()} ({self._log})" if said else f"see {self._log}"


@contextlib.contextmanager
def deployed(config: Path, overrides: Sequence[str], log: Path) -> Iterator[Deployed]:
    """Starts `pdserve up CONFIG --set ...` on free ports, and stops it when the block ends. Its
    output goes to `log`. Not ready yet: see `wait_ready`."""
    command = [sys.executable, "-m", "cluster.tied_child", str(os.getpid()), "cli"]
    command += ["up", str(config)]
    for override in (*overrides, "router.http='127.0.0.1:0'", "router.grpc='127.0.0.1:0'"):
        command += ["--set", override]
    with log.open("wb") as output:
        # A group of its own: Ctrl-C goes to us, and we end it in order. Of our session: Linux
        # shares processors out by session first, and kept clients waiting while workers computed.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            process_group=0, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    running = Deployed(process, log)
    try:
        yield running
    finally:
        running.stop()
