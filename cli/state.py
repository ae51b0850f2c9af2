"""Which deployments run on this machine: one small file for each `pdserve up`."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.process_tree import ProcessId
from core.errors import ConfigError, UnavailableError
from rpc.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Deployment:
    """One running `pdserve up`. The HTTP address names it: no two can have the same."""

    http: str  # host:port, as configured
    url: str  # where a client of this machine reaches it
    pid: int
    start_ticks: int
    controller: str  # host:port of ClusterService
    config: str
    log_dir: str
    token: str = field(default="", repr=False)  # of the cluster, for `pdserve down`
    tls: dict[str, str] | None = None  # the files of TlsFiles, for calls to the controller
    ray: str | None = None  # somebody else's cluster: there it outlives a killed `pdserve up`

    @property
    def tls_files(self) -> TlsFiles | None:
        return TlsFiles(**self.tls) if self.tls is not None else None

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)


def deployment_name(http: str) -> str:
    """The HTTP address as part of a file's or an actor's name."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in http)


def log_dir_for(http: str) -> Path:
    return _state_home() / "logs" / deployment_name(http)


def wanted_path(http: str) -> Path:
    """Of the file in which the controller keeps the wanted state."""
    return _state_home() / "wanted" / f"{deployment_name(http)}.json"


def running_deployments() -> list[Deployment]:
    """All that run, by address. Files whose process is gone are removed; those of deployments on
    somebody else's cluster stay until they are ended."""
    found = []
    for path in sorted(_run_dir().glob("*.json")):
        try:
            deployment = Deployment(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            deployment = None
        if deployment is not None and (deployment.process.is_alive or deployment.ray):
            found.append(deployment)
        else:
            path.unlink(missing_ok=True)
    return found


def find_deployment(http: str | None) -> Deployment | None:
    """The one that serves `http`, or the only one. None if there is none; ConfigError if there
    are several to choose from."""
    running = running_deployments()
    if http is not None:
        wanted = http.rpartition("://")[2].rstrip("/")
        return next((d for d in running if wanted in (d.http, d.url.rpartition("://")[2])), None)
    if len(running) > 1:
        choices = ", ".join(d.http for d in running)
        raise ConfigError(f"several deployments run here, name one: {choices}")
    return running[0] if running else None


def register(deployment: Deployment) -> None:
    """Writes the deployment's file, which only its owner may read. Raises UnavailableError."""
    path = _file_of(deployment.http)
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(asdict(deployment), file)
        temporary.replace(path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror}") from error


def forget(deployment: Deployment) -> None:
    """Removes the file of one that has ended."""
    _file_of(deployment.http).unlink(missing_ok=True)


def _state_home() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "pdserve"


def _file_of(http: str) -> Path:
    return _run_dir() / f"{deployment_name(http)}.json"


def _run_dir() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pdserve" if runtime else _state_home() / "run"
