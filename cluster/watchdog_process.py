"""`watchdog_process.py PATIENCE_S`: kills its parent when nothing comes on stdin for so long, and
ends when stdin does. A script of the standard library alone; see watchdog.py."""

import os
import select
import signal
import sys

_LOOK_S = 0.5


def watch(patience_s: float) -> None:
    """Silence is counted in looks and not by a clock: after a pause of the whole machine, or of
    this process alone, the parent has its time to speak."""
    parent = os.getppid()
    looks_left = most = max(1, round(patience_s / _LOOK_S))
    while looks_left:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if not readable:
            looks_left -= 1
        elif os.read(0, 4096):
            looks_left = most
        else:
            return  # the parent has died
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
        print(
            f"pdserve: error: the controller (pid {parent}) has done nothing for {patience_s:g} s "
            "and was killed; Ray starts it again",
            file=sys.stderr, flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    watch(float(sys.argv[1]))
