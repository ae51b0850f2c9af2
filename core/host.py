"""What this host has to give."""

import gc
import os
from pathlib import Path

_DEFAULT_KV_SHARE = 0.3
_DEFAULT_KV_LIMIT = 2 << 30


def available_memory() -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, or what is left under the
    container's own limit (cgroup v2) where that is less."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return available
    return min(available, max(0, limit - used))


def available_cpus() -> int:
    """Cores that this process may run on, or what its container's limit (cgroup v2) is worth where
    that is less."""
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return cores


def default_kv_memory(workers_on_host: int = 1) -> int:
    """Bytes for one worker's KV blocks when nobody has said: a share of what is free."""
    return min(_DEFAULT_KV_LIMIT, int(_DEFAULT_KV_SHARE * available_memory() / workers_on_host))


def spare_collector() -> None:
    """What is there now stays. The collector need not look at it again, which takes it 100 to 500
    ms in a worker, while every stream stands still; and not after every few hundred objects of the
    requests that come: nearly all are freed without it."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
