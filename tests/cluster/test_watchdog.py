"""A process that hangs is killed by its watchdog; one that does not is left alone."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.live import wait_until

ROOT = Path(__file__).parents[2]
PATIENCE_S = 1.0
# Says that it is there, then does what it reads: exec in the event loop.
WATCHED = f"""
import asyncio, sys, time
from cluster.watchdog import Watchdog

async def main():
    Watchdog({PATIENCE_S}).start()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, lambda: exec(sys.stdin.readline()))
    await asyncio.sleep(0.1)
    print("there", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Watched:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCHED], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "there\n"

    def dog(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def run(self, statement: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{statement}\n")
        self.process.stdin.flush()


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.process.kill()
    watched.process.communicate(timeout=10)


@pytest.mark.parametrize("hang", ["stopped", "blocked"])
def test_one_that_hangs_is_killed(watched: Watched, hang: str) -> None:
    dog = watched.dog()
    if hang == "stopped":
        watched.process.send_signal(signal.SIGSTOP)
    else:
        watched.run("time.sleep(600)")
    assert watched.process.wait(60) == -signal.SIGKILL
    assert watched.process.stderr is not None
    said = watched.process.stderr.readline()
    assert f"(pid {watched.process.pid}) has done nothing for 1 s and was killed" in said
    wait_until(lambda: _has_ended(dog), 30, "the end of the watchdog")


def test_one_that_is_only_busy_is_left_alone_and_a_dead_watchdog_is_replaced(
    watched: Watched,
) -> None:
    first = watched.dog()
    for _ in range(2):
        watched.run(f"time.sleep({PATIENCE_S / 2})")
        time.sleep(PATIENCE_S)
    first.kill()
    wait_until(lambda: [d for d in _children(watched) if d != first], 30, "a new watchdog")
    assert watched.process.poll() is None
    second = watched.dog()
    watched.process.kill()
    wait_until(lambda: _has_ended(second), 30, "the end of the watchdog")


def test_a_pause_of_the_whole_machine_is_no_silence(watched: Watched) -> None:
    """The watchdog looks again before the beat can come."""
    dog = watched.dog()
    watched.process.send_signal(signal.SIGSTOP)
    dog.suspend()
    time.sleep(2 * PATIENCE_S)
    dog.resume()
    watched.process.send_signal(signal.SIGCONT)
    time.sleep(PATIENCE_S)
    assert watched.process.poll() is None
    assert watched.dog() == dog


def _children(watched: Watched) -> list[psutil.Process]:
    return psutil.Process(watched.process.pid).children()


def _has_ended(process: psutil.Process) -> bool:
    """It is nobody's child then, and may stay a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
