"""`python -m cluster.tied_child PARENT_PID MODULE ARGS...` runs a module as `python -m` would,
in a process that the kernel ends when its parent dies, however the parent dies."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int) -> None:
    """SIGTERM on the death of the parent thread. Exits at once if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(1)


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
