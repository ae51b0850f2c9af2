"""What each worker gets of the host it shares: threads, memory for KV blocks. And whether the
whole deployment fits, asked before anything is loaded."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from core.config import Config, PoolConfig
from core.errors import ConfigError, ModelError
from core.host import available_cpus, default_kv_memory
from core.model_files import resolve_model

GIB = 1 << 30
WORKER_OVERHEAD_BYTES = 600 << 20  # interpreter, torch, activations; measured 450 to 600 MB
LOCAL_CPU = "pdserve_cpu"
RAY_OVERHEAD_BYTES = 700 << 20  # Ray's own processes of a local cluster, and the controller


@dataclass(frozen=True, slots=True)
class HostShare:
    """One process's part of its host. 0 leaves the choice to the worker."""

    num_threads: int = 0
    kv_memory_bytes: int = 0


def num_processes(config: Config) -> int:
    """Of all workers together: one a rank."""
    pools = (config.pools.named(name) for name in config.active_pools)
    return sum(pool.replicas * pool.tensor_parallel_size for pool in pools)


def bundle_for(pool: PoolConfig) -> dict[str, float]:
    """The resources that each rank of a worker of the pool reserves; one CPU unless the pool says
    else."""
    bundle = {name: amount for name, amount in ({"CPU": 1.0} | pool.resources).items() if amount}
    if not bundle or any(amount < 0 for amount in bundle.values()):
        raise ConfigError(f"pools: resources must be positive and not all 0, got {pool.resources}")
    return bundle


def local_bundle(bundle: dict[str, float]) -> dict[str, float]:
    """The same on a Ray of our own. There CPUs only order who gets how many threads, and pools
    may grow while it runs: they are counted in a resource that never runs out."""
    return {LOCAL_CPU if name == "CPU" else name: amount for name, amount in bundle.items()}


def share_of(config: Config, pool_name: str, is_local: bool) -> HostShare:
    """The share of each of a worker's processes. On a cluster only the reservation is known: its
    CPUs become threads and the worker measures memory itself, as it does wherever it has a GPU."""
    pool = getattr(config.pools, pool_name)
    cpus = pool.resources.get("CPU")
    if cpus is None and is_local:
        threads = max(1, available_cpus() // max(1, num_processes(config)))
    else:
        threads = max(1, int(bundle_for(pool).get("CPU", 1)))
    if not is_local or pool.resources.get("GPU"):
        return HostShare(num_threads=threads)
    return HostShare(threads, default_kv_memory(num_processes(config)))


def weights_bytes(path: Path, dtype: str) -> int:
    """About what the loaded weights of a model take. Quantised GGUF files hold about 4.5 bits a
    weight and are loaded as 16 or 32; safetensors are 16 bits, or 8 if their config says so."""
    if path.is_dir():
        stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        growth = 2.0 if dtype == "float32" else 1.0
        if _is_fp8(path / "config.json"):
            growth *= 2
    else:
        stored = path.stat().st_size
        growth = 7.0 if dtype == "float32" else 3.5
    return int(stored * growth)


def _is_fp8(path: Path) -> bool:
    try:
        quantization = json.loads(path.read_text()).get("quantization_config") or {}
    except (OSError, ValueError, AttributeError):
        return False  # the loader will say what is wrong with it
    return quantization.get("quant_method") == "fp8"


def pool_weights_bytes(config: Config, pool: str, model_path: Path) -> int:
    """About what one worker of a pool loads: the model, and one that guesses for it if that is
    on this machine already."""
    total, name = weights_bytes(model_path, config.dtype), config.draft_model_of(pool)
    if name is not None:
        with contextlib.suppress(ModelError):
            draft = resolve_model(name, download=False)
            total += weights_bytes(draft.path, config.dtype)
    return total


def check_memory(config: Config, model_path: Path, available_bytes: int) -> None:
    """Raises ConfigError if a local deployment cannot fit into the available memory. An estimate
    that errs on the small side: it stops what cannot work, and lets through what may."""
    pools = [config.pools.named(name) for name in config.active_pools]
    if any(pool.resources.get("GPU") for pool in pools):
        return
    kv = default_kv_memory(num_processes(config))
    sizes = {name: _worker_bytes(config, name, model_path, kv) for name in config.active_pools}
    workers = sum(pool.replicas for pool in pools)
    needed = RAY_OVERHEAD_BYTES + sum(
        config.pools.named(name).replicas * size for name, size in sizes.items()
    )
    if needed > available_bytes:
        weights = max(pool_weights_bytes(config, name, model_path) for name in sizes)
        raise ConfigError(
            f"too little memory: {workers} worker{'s' * (workers != 1)} of about "
            f"{max(sizes.values()) / GIB:.1f} GiB (weights {weights / GIB:.1f}, KV blocks "
            f"{kv / GIB:.1f} a process) and Ray need about {needed / GIB:.1f} GiB, "
            f"{available_bytes / GIB:.1f} GiB are available"
        )


def check_room(config: Config, pool: str, model_path: Path, available_bytes: int) -> None:
    """Raises ConfigError if one more worker of a pool of a local deployment does not fit."""
    needed = _worker_bytes(config, pool, model_path, default_kv_memory(num_processes(config)))
    if needed > available_bytes:
        raise ConfigError(
            f"too little memory for 1 more worker: about {needed / GIB:.1f} GiB are needed, "
            f"{available_bytes / GIB:.1f} GiB are available"
        )


def _worker_bytes(config: Config, pool: str, model_path: Path, kv: int) -> int:
    """Its ranks share the weights; each has KV blocks and an interpreter of its own, and takes no
    more than its budget."""
    ranks = config.pools.named(pool).tensor_parallel_size
    budget = config.engine_for(pool).memory_budget
    if budget is not None:
        return ranks * budget
    return pool_weights_bytes(config, pool, model_path) + ranks * (kv + WORKER_OVERHEAD_BYTES)
