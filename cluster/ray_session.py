"""Ray, from init to the last of its processes gone."""

import contextlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when ray is imported or started. No statistics leave the machine, and no launcher's hook
# packs the working directory.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# A lost connection is an error, never a second Ray that nobody asked for.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Serving does not need Ray's head: while it is away, nobody ends himself for it. Ray's own patience
# is 60 s. What is started from here inherits this; nodes that others start have what they were
# started with (docs/nodes.md).
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(7 * 24 * 3600))
# Ray asks to choose what a worker without a GPU sees of the host's GPUs: none, as it always was.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
# By itself it runs workers at nice 15: whatever else wakes up on the host would come first.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray  # noqa: E402

from cluster.backoff import Backoff  # noqa: E402
from cluster.lives import NAMESPACE  # noqa: E402
from cluster.process_tree import ProcessId, adopt_orphans, descendants, end_all, identify, name_of  # noqa: E402
from cluster.sizing import LOCAL_CPU, bundle_for, local_bundle  # noqa: E402
from core.config import Config  # noqa: E402
from core.errors import ConfigError, PdserveError, UnavailableError  # noqa: E402

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; no KV and no token passes through it
_UNLIMITED = 1e6
_CONNECT_S = 60.0
_END_PATIENCE_S = 8.0
_GCS, _RAYLET = "gcs_server", "raylet"
_INIT_OPTIONS: dict[str, Any] = {
    "namespace": NAMESPACE,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
}
_TEMP_PREFIX = "pdserve-ray-"


class RaySession:
    """What is known of the Ray that this process uses. Of a local one: its processes, its files,
    and which of them are the head: the GCS, which keeps what it knows on disk and is started again
    when it ends, and the raylet, the parent of all workers, which is not. While one of them is
    gone every call of Ray waits for it. Of somebody else's cluster: nothing."""

    def __init__(self, temp_dir: Path | None = None) -> None:
        self.temp_dir = temp_dir
        self._before = set(descendants(os.getpid()))
        self._head: dict[str, ProcessId] = {}
        self._gcs_since = 0.0
        self._gcs_start_at = math.inf  # when one that has ended is started again
        self._backoff = Backoff(first_s=0.5)

    def find_head(self) -> None:
        """To be called when a local Ray, or its GCS, has just been started."""
        names = {name_of(process): process for process in self._started()}
        self._head.update({name: names[name] for name in (_GCS, _RAYLET) if name in names})
        self._gcs_since = time.monotonic()

    @property
    def lost(self) -> str:
        """The name of a head process that has ended unasked; "" if all is well."""
        return next((name for name, process in self._head.items() if not process.is_alive), "")

    @property
    def is_over(self) -> bool:
        """Whether the raylet has ended, and with it every worker."""
        return _RAYLET in self._head and not self._head[_RAYLET].is_alive

    def keep_head(self) -> str:
        """Starts a GCS that has ended unasked again, after a growing pause. To be called now and
        then, on the thread that started Ray. Returns what there is to say, or ""."""
        if _GCS not in self._head or self._head[_GCS].is_alive:
            return ""
        now = time.monotonic()
        if self._gcs_start_at == math.inf:
            self._gcs_start_at = now + self._backoff.after_death(now - self._gcs_since)
            return "Ray's head has ended; requests go on, and it is started again"
        if now < self._gcs_start_at:
            return ""
        self._gcs_start_at = math.inf
        try:
            _start_gcs_again()
        except Exception as error:  # of Ray; streams are not to end for it
            logger.exception("cannot start Ray's head again")
            return (
                f"Ray's head cannot be started again: {error}; requests go on, but no worker is "
                "replaced: end this and start it again when it suits"
            )
        self.find_head()
        return "Ray's head is back"

    def leave(self) -> None:
        """Disconnects from another's cluster, if it is one: it is not needed any more, and its
        loss would end this process. What is detached there goes on."""
        if self.temp_dir is None:
            ray.shutdown()

    def end(self) -> None:
        """Ends a local Ray, by its own means if it still has its head. Afterwards none of its
        processes and files are left. Disconnects from another's."""
        started = self._started() if self.temp_dir else []
        if not self.lost:
            ray.shutdown()
        end_all(started, 0.0 if self.lost else _END_PATIENCE_S)
        if self.temp_dir:
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    def _started(self) -> list[ProcessId]:
        return [process for process in descendants(os.getpid()) if process not in self._before]


@contextlib.contextmanager
def ray_session(config: Config) -> Iterator[RaySession]:
    """A local Ray that dies with this process, or a connection to `ray.address`.

    Call it on the main thread: the kernel ends Ray's processes when the thread that started them
    ends. On the way out every process of a local Ray is gone, and its files are removed.
    Raises UnavailableError if Ray cannot be started or reached."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = config.ray.address
    session = RaySession(_make_temp_dir() if address is None else None)
    try:
        try:
            if address is None:
                _start_local(config, session)
            else:
                _connect(address)
        except PdserveError:
            raise
        except Exception as error:
            what = "start a local Ray" if address is None else f"reach Ray at {address}"
            raise UnavailableError(f"cannot {what}: {error}") from error
        yield session
    finally:
        session.end()


def _connect(address: str, patience_s: float = _CONNECT_S) -> None:
    """To a cluster that may be starting at this moment too, as in one pod."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            ray.init(address=address, **_INIT_OPTIONS)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _start_local(config: Config, session: RaySession) -> None:
    adopt_orphans()  # of a raylet that dies before its workers
    try:
        _init_local(config, session)
    except (RuntimeError, OSError) as error:
        # Once in some hundreds of starts the GCS does not come up, and Ray gives up after 120 s.
        logger.warning("Ray has not started, once more: %s", error)
        session.end()
        assert session.temp_dir is not None
        session.temp_dir.mkdir(mode=0o700)
        _init_local(config, session)
    session.find_head()
    _refuse_impossible(config)


def _init_local(config: Config, session: RaySession) -> None:
    ray.init(
        address="local",
        num_cpus=_cpus_needed(config),
        resources={LOCAL_CPU: _UNLIMITED},
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        _temp_dir=str(session.temp_dir),
        _system_config={"gcs_storage": "rocksdb", "gcs_storage_path": f"{session.temp_dir}/gcs"},
        **_INIT_OPTIONS,
    )


def _start_gcs_again() -> None:
    """At its old address, where raylet and workers look for it, on what it has written."""
    node = ray._private.worker._global_node
    node.kill_gcs_server(check_alive=False)  # it is dead already: clears what is known of it
    node.start_gcs_server()


def _bundles(config: Config) -> list[dict[str, float]]:
    pools = [config.pools.named(name) for name in config.active_pools]
    return [
        bundle_for(pool) for pool in pools for _ in range(pool.replicas * pool.tensor_parallel_size)
    ]


def _cpus_needed(config: Config) -> int:
    """As many processes are started ahead of the controller and the workers that will live in
    them."""
    return 1 + math.ceil(sum(bundle.get("CPU", 0) for bundle in _bundles(config)))


def _refuse_impossible(config: Config) -> None:
    """On one machine nothing will come later: what is not there now is an error now."""
    total = ray.cluster_resources()
    needed: dict[str, float] = {}
    for bundle in map(local_bundle, _bundles(config)):
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
