"""Ray, from init to the last of its processes gone."""

import contextlib
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Read when ray is imported or started. No statistics leave the machine, and no launcher's hook
# packs the working directory.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# A lost connection is an error, never a second Ray that nobody asked for.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Ray asks to choose what a worker without a GPU sees of the host's GPUs: none, as it always was.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")

import ray  # noqa: E402

from cluster.process_tree import ProcessId, descendants, end_all, identify  # noqa: E402
from cluster.sizing import bundle_for  # noqa: E402
from cluster.worker_slot import NAMESPACE  # noqa: E402
from core.config import Config  # noqa: E402
from core.errors import ConfigError, UnavailableError  # noqa: E402

_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; no KV and no token passes through it
_END_PATIENCE_S = 8.0
_TEMP_PREFIX = "pdserve-ray-"


@contextlib.contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """A local Ray that dies with this process, or a connection to `ray.address`.

    Call it on the main thread: the kernel ends Ray's processes when the thread that started them
    ends. On the way out every process of a local Ray is gone, and its files are removed.
    Raises UnavailableError if Ray cannot be started or reached."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if config.ray.address is not None:
        with _connected(config.ray.address):
            yield
        return
    temp_dir = _make_temp_dir()
    before = set(descendants(os.getpid()))
    try:
        try:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=_cpus_needed(config),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(temp_dir),
            )
        except Exception as error:
            raise UnavailableError(f"cannot start a local Ray: {error}") from error
        _refuse_impossible(config)
        yield
    finally:
        started = [p for p in descendants(os.getpid()) if p not in before]
        ray.shutdown()
        end_all(started, _END_PATIENCE_S)
        shutil.rmtree(temp_dir, ignore_errors=True)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise UnavailableError(f"cannot reach Ray at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _bundles(config: Config) -> list[dict[str, float]]:
    pools = [getattr(config.pools, name) for name in config.active_pools]
    return [bundle_for(pool) for pool in pools for _ in range(pool.replicas)]


def _cpus_needed(config: Config) -> int:
    """A local Ray counts CPUs for the reservations alone; threads are shared out elsewhere."""
    return max(1, math.ceil(sum(bundle.get("CPU", 0) for bundle in _bundles(config))))


def _refuse_impossible(config: Config) -> None:
    """On one machine nothing will come later: what is not there now is an error now."""
    total = ray.cluster_resources()
    needed: dict[str, float] = {}
    for bundle in _bundles(config):
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0) + amount
    lacking = [
        f"{name} {amount:g} (this machine has {total.get(name, 0):g})"
        for name, amount in needed.items()
        if total.get(name, 0) < amount
    ]
    if lacking:
        raise ConfigError(f"pools: the workers need {', '.join(lacking)}")


def _make_temp_dir() -> Path:
    """A short path, since sockets go below it. Folders of processes that were killed before they
    could remove theirs are removed here."""
    root = Path("/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir())
    for old in root.glob(f"{_TEMP_PREFIX}*"):
        pid, _, ticks = old.name.removeprefix(_TEMP_PREFIX).partition("-")
        numbers = pid.isdigit() and ticks.isdigit()
        if numbers and not ProcessId(int(pid), int(ticks)).is_alive:
            shutil.rmtree(old, ignore_errors=True)
    me = identify(os.getpid())
    assert me is not None, "this process exists"
    path = root / f"{_TEMP_PREFIX}{me.pid}-{me.start_ticks}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    return path
