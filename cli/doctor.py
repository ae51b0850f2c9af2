"""`pdserve doctor`: what this machine has for pdserve, what it lacks, and what to do about it."""

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cli.doctor_live import check_clock, check_deployment
from cli.findings import Finding, Verdict
from cli.preflight import claim_addresses
from cli.state import running_deployments
from core.config import Config, load_config
from core.errors import PdserveError
from core.host import available_memory
from core.model_files import ModelFiles, resolve_model

_GIB = 1 << 30
_LEAST_SHM = 256 << 20  # Ray's object store and NIXL's own segments
_PROBE_S = 60.0
_PACKAGES = ("torch", "ray", "nixl", "grpcio", "protobuf", "safetensors", "gguf")
# In a process of its own: these libraries are large, and may crash where drivers are broken.
_PROBE = """
import json
said = {}
try:
    import torch
    said["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    said["torch"] = f"{type(error).__name__}: {error}"
try:
    from nixl._api import nixl_agent, nixl_agent_config
    said["plugins"] = sorted(nixl_agent("doctor", nixl_agent_config(backends=[])).get_plugin_list())
except Exception as error:
    said["nixl"] = f"{type(error).__name__}: {error}"
print("PROBE " + json.dumps(said))
"""


Check = Callable[[], Iterator[Finding]]


def examine(
    config_path: Path | None, overrides: Sequence[str] = (), url: str | None = None
) -> Iterator[Finding]:
    """Every finding, one after the other; no check ends the others. `url`: of a router whose
    deployment is examined too; None: of those that run here."""
    config: Config | None = None
    if config_path is not None:
        try:
            config = load_config(config_path, overrides)
            yield Finding(Verdict.GOOD, f"{config_path} is valid")
        except PdserveError as error:
            yield Finding(Verdict.BAD, error.message, "correct the file; configs/local.yaml "
                          "explains every key")  # fmt: skip
    yield from check_versions()
    yield from check_shared_memory()
    yield from check_limits()
    yield from check_clock()
    yield from read_probe(_run_probe())
    if config is not None:
        yield from check_ports(config)
        yield from check_model(config)
    for found in [url] if url is not None else [d.url for d in running_deployments()]:
        yield from check_deployment(found)


def check_versions() -> Iterator[Finding]:
    found, missing = [f"python {sys.version.split()[0]}"], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(Verdict.GOOD, ", ".join(found))
    if missing:
        advice = "workers need them: pip install 'pdserve[worker]'; a router does not"
        yield Finding(Verdict.NOTE, f"not installed: {', '.join(missing)}", advice)


def check_shared_memory(path: str = "/dev/shm", least: int = _LEAST_SHM) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        yield Finding(Verdict.BAD, f"{path}: {error.strerror}",
                      "Ray needs it; in a container mount a tmpfs there")  # fmt: skip
        return
    what = f"shared memory: {free / _GIB:.1f} GiB free in {path}"
    if free < least:
        yield Finding(Verdict.BAD, what, f"at least {least >> 20} MiB; docker run --shm-size=1g, "
                      "on Kubernetes an emptyDir with medium: Memory")  # fmt: skip
    else:
        yield Finding(Verdict.GOOD, what)


def check_limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    verdict = Verdict.GOOD if files >= 4096 else Verdict.NOTE
    yield Finding(verdict, f"open files: up to {files}",
                  "" if files >= 4096 else "ulimit -n 65536, for many streams")  # fmt: skip
    if Path("/dev/infiniband").is_dir():
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        enough = locked in (resource.RLIM_INFINITY, -1)
        yield Finding(
            Verdict.GOOD if enough else Verdict.BAD,
            "RDMA devices are here" + ("" if enough else ", but locked memory is limited"),
            "" if enough else "ulimit -l unlimited; in a container the capability IPC_LOCK",
        )
    else:
        yield Finding(Verdict.GOOD, "no RDMA device: KV travels by shared memory or TCP")


def _run_probe() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S,
            env={**os.environ, "UCX_LOG_LEVEL": "fatal"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_S:g} s"
    return done.stdout if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr}"


def read_probe(output: str) -> Iterator[Finding]:
    """What the libraries of a worker said in their own process."""
    lines = [line for line in output.splitlines() if line.startswith("PROBE ")]
    if not lines:
        words = " ".join(output.split())[-200:]
        advice = "install them again, in pdserve's folder: make clean install"
        yield Finding(Verdict.BAD, f"torch or NIXL crashed: {words}", advice)
        return
    said = json.loads(lines[-1].removeprefix("PROBE "))
    if "torch" in said:
        yield Finding(Verdict.NOTE, f"torch cannot be loaded: {said['torch']}",
                      "workers need it: pip install 'pdserve[worker]'")  # fmt: skip
    elif said["gpus"]:
        yield Finding(Verdict.GOOD, f"{len(said['gpus'])} GPU(s): {', '.join(said['gpus'])}")
    else:
        seen = shutil.which("nvidia-smi") is not None
        advice = "nvidia-smi is here, but torch sees no GPU: check driver and CUDA build" * seen
        verdict = Verdict.NOTE if seen else Verdict.GOOD
        yield Finding(verdict, "no GPU: workers compute on the CPU", advice)
    if "nixl" in said:
        yield Finding(Verdict.NOTE, f"NIXL does not work: {said['nixl']}",
                      "KV travels by gRPC instead, at about a tenth of the speed")  # fmt: skip
    elif "UCX" not in said["plugins"]:
        yield Finding(Verdict.NOTE, f"NIXL has no UCX, only {', '.join(said['plugins']) or 'none'}",
                      "KV travels by gRPC instead; pip install --force-reinstall nixl")  # fmt: skip
    else:
        yield Finding(Verdict.GOOD, f"NIXL works, with {', '.join(said['plugins'])}")


def check_ports(config: Config) -> Iterator[Finding]:
    own = next((d for d in running_deployments() if d.http == config.router.http), None)
    if own is not None:
        yield Finding(Verdict.GOOD, f"this deployment runs already (pid {own.pid}) at {own.url}")
        return
    try:
        claim_addresses(config)
        yield Finding(Verdict.GOOD, f"{config.router.http} and {config.router.grpc} are free")
    except PdserveError as error:
        yield Finding(Verdict.BAD, error.message, "or stop what holds it")


def check_model(config: Config) -> Iterator[Finding]:
    try:
        model = resolve_model(config.model, download=False)
    except PdserveError as error:
        yield Finding(Verdict.NOTE, error.message, f"pdserve models pull {config.model}")
        return
    yield Finding(Verdict.GOOD, f"model {model.name} is at {model.path}")
    if config.ray.address is None:
        yield from check_fit(config, model, available_memory())


def check_fit(config: Config, model: ModelFiles, available: int) -> Iterator[Finding]:
    from cluster.sizing import check_memory

    try:
        check_memory(config, model.path, available)
        yield Finding(Verdict.GOOD, f"{available / _GIB:.1f} GiB of memory are enough")
    except PdserveError as error:
        yield Finding(Verdict.BAD, error.message,
                      "fewer replicas, a smaller model, or mode: colocated")  # fmt: skip
