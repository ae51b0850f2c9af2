"""A real deployment for a test: `pdserve up` as a user would start it, on ports of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.ports import free_port

ROOT = Path(__file__).parents[2]
PDSERVE = Path(sys.executable).parent / "pdserve"


def wait_until(condition: Any, timeout_s: float = 30.0, what: str = "") -> Any:
    """Polls until `condition()` is truthy and returns it; fails loudly when it never is."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(0.05)


def shm_files() -> set[str]:
    """Shared memory of the kinds that a deployment makes: other programs of this machine come
    and go meanwhile."""
    kinds = ("ucx", "nixl", "plasma", "ray", "torch", "psm")
    return {name for name in os.listdir("/dev/shm") if any(kind in name for kind in kinds)}


class Live:
    """One running deployment, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], http: int, grpc: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{http}"
        self.grpc_address = f"127.0.0.1:{grpc}"
        self.log = log

    def view(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/cluster", timeout=10).json())

    def workers(self, role: str | None = None) -> list[dict[str, Any]]:
        return [w for w in self.view()["workers"] if role in (None, w["role"])]

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=timeout)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        body = {"model": "smollm2-135m", "prompt": prompt, "temperature": 0, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Until every worker that the deployment wants is ready and the router says so."""

        def is_ready() -> bool:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code != 200:
                    return False
                return all(w["state"] == "ready" for w in self.workers())
            except httpx.TransportError:
                return False

        wait_until(is_ready, timeout_s, f"all workers ready, log: {self.log}")

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Until nothing is in use anywhere: the promise that nothing leaks."""

        def is_idle() -> bool:
            return all(
                w["kv_blocks"][state] == 0
                for w in self.workers()
                if w["state"] == "ready"
                for state in ("running", "held", "awaiting")
            ) and all(
                w["requests_running"] == w["requests_waiting"] == 0
                for w in self.workers()
                if w["state"] == "ready"
            )

        wait_until(is_idle, timeout_s, f"idle: {self.view()}")


@contextmanager
def deployment(
    config: str,
    log: Path,
    settings: Sequence[str] = (),
    timeout_s: float = 120.0,
    command: Sequence[str] = (str(PDSERVE),),
) -> Iterator[Live]:
    """Runs `pdserve up configs/<config>` until the block ends, then Ctrl-C. `command`: instead of
    pdserve."""
    http, grpc = free_port(), free_port()
    command = [*command, "up", str(ROOT / "configs" / config)]
    for setting in (
        f"router.http=127.0.0.1:{http}",
        f"router.grpc=127.0.0.1:{grpc}",
        *settings,
    ):
        command += ["--set", setting]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=log.parent,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    live = Live(process, http, grpc, log)
    try:
        wait_until(
            lambda: process.poll() is not None or _answers(live), timeout_s, f"up, log: {log}"
        )
        assert process.poll() is None, f"pdserve up ended: {log.read_text()[-4000:]}"
        live.wait_ready()
        yield live
    finally:
        stop(process)


def stop(process: subprocess.Popen[str], timeout_s: float = 30.0) -> int:
    """Ctrl-C, and a hard end for the whole group if that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            raise
    return process.returncode


def _answers(live: Live) -> bool:
    try:
        return httpx.get(f"{live.url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
