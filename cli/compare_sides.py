"""The deployments that `pdserve compare` compares: all out of one file, on the same resources."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.config import Config
    from loadgen.chart import LabelledRun

BASE, CANDIDATE, CONDITIONAL = "colocated", "disaggregated", "conditional"
CONDITIONAL_TOKENS = 256


@dataclass(slots=True)
class Side:
    """One way to serve, and what its repetitions measured."""

    name: str
    overrides: tuple[str, ...]
    resources: str
    runs: "list[LabelledRun]" = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)

    @property
    def summaries(self) -> list[dict[str, Any]]:
        return [run.summary for run in self.runs]


def make_sides(
    path: Path,
    overrides: Sequence[str],
    for_colocated: Sequence[str],
    for_disaggregated: Sequence[str],
    colocated_replicas: int | None,
    conditional: int | None,
) -> tuple[Side, ...]:
    """All deployments out of one file. A file that says nothing of pools.colocated gets as many
    workers there as prefill and decode have together, each with the resources, the ranks and the
    engine of a decode worker; where prefill workers have another number of ranks, as many as make
    the ranks of both. Raises ConfigError."""
    from core.config import PoolConfig, load_config

    config = load_config(path, overrides)
    pools = config.pools
    base = [*overrides, "mode=colocated"]
    if pools.colocated == PoolConfig() and config.mode == "disaggregated":
        ranks = pools.decode.tensor_parallel_size
        of_prefill = pools.prefill.replicas * pools.prefill.tensor_parallel_size
        both = pools.decode.replicas + -(-of_prefill // ranks)
        base += [
            f"pools.colocated.replicas={both}",
            f"pools.colocated.tensor_parallel_size={ranks}",
            f"pools.colocated.resources={json.dumps(pools.decode.resources)}",
            f"pools.colocated.engine={json.dumps(pools.decode.engine)}",
        ]
    if colocated_replicas is not None:
        base.append(f"pools.colocated.replicas={colocated_replicas}")
    base += for_colocated
    if conditional is None:
        conditional = config.router.max_local_prefill_tokens or CONDITIONAL_TOKENS
    made = {BASE: base}
    for name, num_tokens in ((CANDIDATE, 0), (CONDITIONAL, conditional)):
        local = f"router.max_local_prefill_tokens={num_tokens}"
        made[name] = [*overrides, "mode=disaggregated", local, *for_disaggregated]
    if not conditional:
        del made[CONDITIONAL]
    return tuple(
        Side(name, tuple(settings), resources_of(load_config(path, settings)))
        for name, settings in made.items()
    )


def resources_of(config: "Config") -> str:
    """What all workers of a deployment take together, for a reader to compare."""
    total: dict[str, float] = {}
    threads: list[int] = []
    workers = 0
    for name in config.active_pools:
        pool, engine = getattr(config.pools, name), config.engine_for(name)
        workers += pool.replicas
        processes = pool.replicas * pool.tensor_parallel_size
        for kind, amount in pool.resources.items():
            total[kind] = total.get(kind, 0.0) + amount * processes
        if engine.threads != "auto":
            threads.append(int(engine.threads) * processes)
    parts = [f"{amount:g} {kind}" for kind, amount in sorted(total.items()) if amount]
    if threads:
        parts.append(f"{sum(threads)} threads")
    return f"{workers} worker{'s' * (workers != 1)}, {', '.join(parts) or 'all cores'}"
