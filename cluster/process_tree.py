"""Processes of this machine, read from /proc. A process is a pid with its start time, so that a
pid that the kernel has given to somebody else is never signalled."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    start_ticks: int  # since boot; with the pid it names one process for ever

    @property
    def is_alive(self) -> bool:
        """False for a zombie too: it holds nothing but its number."""
        stat = _stat(self.pid)
        return stat is not None and stat[2] == self.start_ticks and stat[0] not in ("Z", "X")


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent pid and start time of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[1]), int(fields[19])


def identify(pid: int) -> ProcessId | None:
    stat = _stat(pid)
    return ProcessId(pid, stat[2]) if stat else None


def adopt_orphans() -> None:
    """From now on a process below this one stays below it when its own parent dies, so that
    `descendants` finds it. Linux only; elsewhere it goes to init."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_of(process: ProcessId) -> str:
    """The kernel's short name of a process; "" when it is gone."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[ProcessId]:
    """All living children of a process, their children, and so on."""
    children: dict[int, list[ProcessId]] = {}
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat and stat[0] not in ("Z", "X"):
            children.setdefault(stat[1], []).append(ProcessId(int(entry), stat[2]))
    found: list[ProcessId] = []
    wanted = [pid]
    while wanted:
        for child in children.pop(wanted.pop(), []):
            found.append(child)
            wanted.append(child.pid)
    return found


def end_all(processes: Iterable[ProcessId], patience_s: float) -> list[ProcessId]:
    """Waits until the processes are gone, and kills those that outlive the patience.
    Returns the killed ones."""
    waited_for = list(processes)
    deadline = time.monotonic() + patience_s
    while any(p.is_alive for p in waited_for) and time.monotonic() < deadline:
        time.sleep(0.05)
    stubborn = [p for p in waited_for if p.is_alive]
    for process in stubborn:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    while any(p.is_alive for p in stubborn) and time.monotonic() < deadline + 2:
        time.sleep(0.02)
    return stubborn
