"""What the process of every actor of pdserve does first: it ends with its node's Ray, and logs to a
file of its own."""

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path

_PARENT_CHECK_S = 1.0


def end_with_raylet() -> None:
    """Ends this process soon after its raylet has died. Ray does so too, but may take a minute,
    in which the memory is missing and a second deployment meets the first."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def log_to(path: Path) -> None:
    """Sends logging, prints and the last words of native code to one file, by name of the worker
    instead of Ray's by number. Earlier lives of the worker stay above in the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=os.fdopen(2, "w", buffering=1, closefd=False),
        force=True,
    )


def keep_old_logs(folder: Path) -> None:
    """The files of an earlier run are kept once, as *.old; `pdserve up` has its own in hand."""
    for path in folder.glob("*.log"):
        if path.name != "up.log":
            path.replace(path.with_suffix(".log.old"))


def node_address() -> str:
    """Of this process's node, where others reach it."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
