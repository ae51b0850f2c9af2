"""What a layout costs whose pools follow the load, against the least fixed sizes that would have
held the same trace, known only in hindsight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from core.config import AutoscaleConfig
from planner.layout import Layout
from planner.result import Result, Slo
from planner.search import Goal
from planner.simulate import Machine, Options, simulate
from planner.trace import Trace


@dataclass(frozen=True, slots=True)
class Bounds:
    """Workers of each pool."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Study:
    """`scaled` begins with `start`. `fixed` is None where `most` workers in each pool do not meet
    the goal either."""

    start: Layout
    configs: Mapping[str, AutoscaleConfig]
    scaled: Result
    fixed: Layout | None
    at_fixed: Result | None


def study(
    layout: Layout,
    machine: Machine,
    trace: Trace,
    goal: Goal,
    bounds: Bounds,
    options: Options,
    say: Callable[[str], None] = lambda _: None,
) -> Study:
    """The whole trace at its own rate, with the layout's degrees. Deterministic."""

    def run(sizes: Mapping[str, int], options: Options = options) -> Result:
        return simulate(sized(layout, sizes), machine, trace, options)

    def holds(sizes: Mapping[str, int]) -> bool:
        say(f"would {sized(layout, sizes)} do?")
        return run(sizes).attainment(goal.slo) >= goal.attainment

    sizes = _least(layout, bounds.most, holds)
    fixed = None if sizes is None else sized(layout, sizes)
    begin = {name: min(max(pool.replicas, bounds.least), bounds.most)
             for name, pool in (fixed or layout).pools.items()}  # fmt: skip
    configs = {name: _config(name, bounds, goal.slo) for name in layout.pools}
    say("following the load")
    scaled = run(begin, replace(options, autoscale=configs))
    at_fixed = None if sizes is None else run(sizes)
    return Study(sized(layout, begin), configs, scaled, fixed, at_fixed)


def sized(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """With other numbers of workers."""
    pools = {name: replace(pool, replicas=sizes[name]) for name, pool in layout.pools.items()}
    return Layout(**pools, max_num_batched_tokens=layout.max_num_batched_tokens)


def _config(pool: str, bounds: Bounds, slo: Slo) -> AutoscaleConfig:
    return AutoscaleConfig(
        min=bounds.least,
        max=bounds.most,
        ttft_p90=None if pool == "decode" else slo.ttft,
        tpot_p90=None if pool == "prefill" else slo.tpot,
    )


def _least(
    layout: Layout, most: int, holds: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """The cheapest that is found by making one pool after the other as small as it can be."""
    names = list(layout.pools)
    largest = dict.fromkeys(names, most)
    if not holds(largest):
        return None
    found = []
    for order in (names, names[::-1]) if len(names) > 1 else (names,):
        sizes = dict(largest)
        for name in order:
            low, high = 0, most
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if holds({**sizes, name: middle}) else (middle, high)
            sizes[name] = high
        found.append(sizes)
    return min(found, key=lambda sizes: sized(layout, sizes).gpus)


# ------------------------------------------------------------------ for people and programs


def as_dict(study: Study, goal: Goal, cost_per_gpu_hour: float | None) -> dict[str, Any]:
    report: dict[str, Any] = {
        "bounds": {name: [c.min, c.max] for name, c in study.configs.items()},
        "scaled": _costs(study.scaled, study.start, goal, cost_per_gpu_hour),
        "changes": sum(len(sizes) - 1 for sizes in study.scaled.sizes.values()),
        "started": study.scaled.num_started,
        "switched": study.scaled.num_switched,
        "largest": {n: max(s for _, s in sizes) for n, sizes in study.scaled.sizes.items()},
        "fixed": None,
    }
    if study.fixed is not None and study.at_fixed is not None:
        fixed = _costs(study.at_fixed, study.fixed, goal, cost_per_gpu_hour)
        report["fixed"] = {"layout": str(study.fixed), **fixed}
        report["cost_ratio"] = report["scaled"]["gpu_hours"] / fixed["gpu_hours"]
    return report


def _costs(
    result: Result, layout: Layout, goal: Goal, cost_per_gpu_hour: float | None
) -> dict[str, Any]:
    hours = {name: seconds / 3600 for name, seconds in result.worker_seconds.items()}
    gpu_hours = sum(h * layout.pools[name].tensor_parallel for name, h in hours.items())
    costs = {
        "attainment": result.attainment(goal.slo),
        "worker_hours": hours,
        "mean_workers": {name: h * 3600 / result.duration for name, h in hours.items()},
        "gpu_hours": gpu_hours,
    }
    if cost_per_gpu_hour is not None:
        costs["cost"] = gpu_hours * cost_per_gpu_hour
    return costs


def as_text(report: dict[str, Any]) -> str:
    """The dictionary of `as_dict`, for a terminal."""
    scaled, fixed = report["scaled"], report["fixed"]
    low, high = next(iter(report["bounds"].values()))
    means = ", ".join(f"{name} {count:.2f}" for name, count in scaled["mean_workers"].items())
    lines = [
        f"Autoscaled, {low} to {high} workers a pool, over the trace: {_hours(scaled)}; "
        f"workers on average {means}; {report['changes']} changes, "
        f"{sum(report['started'].values())} starts, {sum(report['switched'].values())} role "
        f"switches",
    ]
    if fixed is None:
        lines.append(f"No fixed size of at most {high} workers a pool meets the goal")
    else:
        lines.append(
            f"The least fixed size in hindsight, {fixed['layout']}: {_hours(fixed)}; autoscaling "
            f"costs {report['cost_ratio']:.2f} times as much"
        )
    return "\n".join(lines)


def _hours(costs: dict[str, Any]) -> str:
    money = f" ({costs['cost']:.2f})" if "cost" in costs else ""
    return f"{costs['gpu_hours']:.2f} GPU hours{money}, {costs['attainment']:.1%} attain the SLO"
