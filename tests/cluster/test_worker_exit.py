"""How the process of a worker ends: its actor, without Ray, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GRACE_S = 1.0
# As a controller that drains it and then ends it. Lines say what it has answered.
SCRIPT = """
import asyncio, json, sys, time
from pathlib import Path
from cluster.worker_actor import WorkerActor
from core.config import parse_config
from core.types import Role
from core.worker_settings import WorkerSettings

folder, grace_s = Path(sys.argv[1]), float(sys.argv[2])

async def main():
    actor = WorkerActor("fake_worker:FakeWorker", None)
    config = parse_config(f"model: none\\nserved_model_name: {folder}")
    outcome = await actor.start(WorkerSettings("decode-0", Role.DECODE, config, num_threads=1))
    assert outcome.info, outcome.error
    if sys.argv[3] == "ends":
        asyncio.get_running_loop().call_later(grace_s / 5, (folder / "decode-0").unlink)
    began = time.monotonic()
    is_quiet = await actor.drain(grace_s)
    print("SAID", json.dumps([is_quiet, time.monotonic() - began]), flush=True)
    await actor.stop(0.0)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(("request_", "is_quiet"), [("ends", True), ("goes on", False)])
def test_a_drained_worker_exits_with_0_within_its_grace(
    tmp_path: Path, request_: str, is_quiet: bool
) -> None:
    """V63: when what ran there has ended, and when it has not: it is resumed elsewhere then."""
    (tmp_path / "decode-0").write_text("1")
    paths = [str(TESTS), str(TESTS.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(GRACE_S), request_],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert "SAID" in done.stdout, done.stderr
    said, seconds = json.loads(done.stdout.partition("SAID ")[2].partition("\n")[0])
    assert said is is_quiet
    assert (seconds < GRACE_S) == is_quiet
    assert "stopped in order" in done.stdout
    assert done.returncode == 0
