"""What differs between two configurations, and what each difference takes. Pure functions."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from core.config import Config


class ChangeKind(StrEnum):
    SCALE = "scale"  # workers come or go
    ROLLOUT = "rollout"  # the pool's workers are replaced one by one
    RESTART = "restart"  # router, tokenizer or the whole of both pools: not while it runs


# Of an engine: what one worker may have different from its peers while a rollout is on the way.
_ENGINE_KEYS = {
    "max_model_len",
    "num_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "threads",
    "idle_threads",
    "decode_pace",
    "gpu_memory_utilization",
    "memory_budget",
    "attention",
    "cuda_graphs",
}
_PLACEMENT_KEYS = {"roles", "resources", "label_selector", "runtime_env", "tensor_parallel_size"}
_WORKER_KEYS = {"kv_transfer.lease_seconds"}


@dataclass(frozen=True, slots=True)
class Change:
    """One key. `pools` are those whose workers it concerns."""

    key: str
    before: Any
    after: Any
    kind: ChangeKind
    pools: tuple[str, ...] = ()


def changes_between(old: Config, new: Config) -> list[Change]:
    """Every difference, by key. Pools that the mode does not use have none."""
    before, after = _flat(old, new.mode), _flat(new, old.mode)
    found = []
    for key in sorted({*before, *after}):
        one, other = before.get(key), after.get(key)
        if one != other and not _is_any_port(key, other) and not _scales_itself(key, new):
            kind, pools = _what_it_takes(key, new)
            found.append(Change(key, one, other, kind, pools))
    return found


def as_yaml(value: Any) -> str:
    """A value as it would stand in the file, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.rstrip().removesuffix("...").rstrip()  # YAML's end of a document


def _what_it_takes(key: str, new: Config) -> tuple[ChangeKind, tuple[str, ...]]:
    first, *rest = key.split(".")
    if first == "pools" and len(rest) >= 2:
        pool, section = rest[0], rest[1]
        if section in ("replicas", "autoscale"):
            return ChangeKind.SCALE, (pool,)
        if section in _PLACEMENT_KEYS or (section == "engine" and rest[-1] in _ENGINE_KEYS):
            return ChangeKind.ROLLOUT, (pool,)
    elif key in _WORKER_KEYS or (first == "engine" and rest[0] in _ENGINE_KEYS):
        return ChangeKind.ROLLOUT, new.active_pools
    return ChangeKind.RESTART, ()


def _scales_itself(key: str, config: Config) -> bool:
    """The number of workers of such a pool is not the file's to say."""
    first, *rest = key.split(".")
    return first == "pools" and rest[1:] == ["replicas"] and (
        config.pools.named(rest[0]).autoscale is not None
    )  # fmt: skip


def _is_any_port(key: str, wanted: Any) -> bool:
    """Port 0 in the file was a wish for any port, and has been granted."""
    return key in ("router.http", "router.grpc") and str(wanted).endswith(":0")


def _flat(config: Config, other_mode: str) -> dict[str, Any]:
    data = config.model_dump()
    if config.mode == other_mode:  # else the mode itself is a difference that cannot be made live
        data["pools"] = {pool: data["pools"][pool] for pool in config.active_pools}
    return dict(_leaves(data, ""))


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        # These are one thing each: a key that goes is as much a change as one that comes.
        if isinstance(value, dict) and key not in {*_PLACEMENT_KEYS, "autoscale"}:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
