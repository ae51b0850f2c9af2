import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_router import Handler
from typer.testing import CliRunner

from cli.main import app


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deployments of the person who runs the tests are not seen, and none is left to them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def pdserve() -> Callable:
    """Runs the command in this process: `pdserve("up", "x.yaml")` -> a result with exit_code,
    stdout and stderr."""

    def run(*arguments: object, **options: object):
        return CliRunner().invoke(app, [str(a) for a in arguments], **options)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Enough of a model for the command, which only looks for its files."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    return path


@pytest.fixture
def config_file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "test.yaml"
    path.write_text(f"model: {model}\nrouter: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0'}}\n")
    return path


@pytest.fixture
def router_url() -> Iterator[str]:
    """A fake router in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def start_up(tmp_path: Path, config_file: Path) -> Iterator[Callable]:
    """Starts `pdserve up` with a fake router and fake workers, in a process group of its own."""
    here = Path(__file__).parent
    # The code of this checkout, wherever an installed one may be.
    paths = [str(here), str(here.parent / "cluster"), str(here.parents[1])]
    started: list[subprocess.Popen[str]] = []

    def start(prefill: str = "FakeWorker") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(here / "up_with_fakes.py"), str(config_file), prefill],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        # The group outlives a killed leader by half a minute: Ray's agents look after it rarely.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
