"""A plan as text for people, as JSON for programs and as the YAML of a deployment."""

from collections.abc import Mapping
from typing import Any

import yaml

from core.config import AutoscaleConfig
from planner.layout import Layout, Pool
from planner.machines import Capability
from planner.result import Result, Slo, percentile
from planner.search import Found, Goal, Plan


def as_dict(
    plan: Plan,
    at_rate: Result,
    capability: Capability,
    goal: Goal,
    rate: float,
    cost_per_gpu_hour: float | None,
) -> dict[str, Any]:
    """`at_rate`: the best layout under the trace as it came, at `rate` requests a second."""
    return {
        "slo": {"ttft": goal.slo.ttft, "tpot": goal.slo.tpot, "attainment": goal.attainment},
        "step_times": {str(tp): source for tp, source in capability.sources.items()},
        "candidates": plan.num_candidates,
        "simulations": plan.num_simulations,
        "layouts": [_found(f, goal.slo, cost_per_gpu_hour) for f in plan.best],
        "at_trace_rate": {"rate": rate, **_result(at_rate, goal.slo)},
        "fewest_gpus": None
        if plan.smallest is None
        else {"gpus": plan.smallest.gpus, "layout": _layout(plan.smallest)},
    }


def _found(found: Found, slo: Slo, cost_per_gpu_hour: float | None) -> dict[str, Any]:
    gpu_hours = found.layout.gpus / 3600 / max(found.at_goodput.output_rate, 1e-9) * 1e6
    costs: dict[str, float] = {"gpu_hours_per_million_output_tokens": gpu_hours}
    if cost_per_gpu_hour is not None:
        costs["per_hour"] = found.layout.gpus * cost_per_gpu_hour
        costs["per_million_output_tokens"] = gpu_hours * cost_per_gpu_hour
    return {
        "layout": _layout(found.layout),
        "gpus": found.layout.gpus,
        "goodput": found.goodput,
        "goodput_per_gpu": found.per_gpu,
        "cost": costs,
        **_result(found.at_goodput, slo),
    }


def _layout(layout: Layout) -> dict[str, Any]:
    pools = {
        name: {"replicas": pool.replicas, "tensor_parallel_size": pool.tensor_parallel}
        for name, pool in layout.pools.items()
    }
    return {
        "mode": "disaggregated" if layout.is_disaggregated else "colocated",
        "pools": pools,
        "max_num_batched_tokens": layout.max_num_batched_tokens,
    }


def _result(result: Result, slo: Slo) -> dict[str, Any]:
    recorder = result.recorder
    return {
        "attainment": result.attainment(slo),
        "ttft": {f"p{p}": percentile(recorder.ttft, p) for p in (50, 90, 99)},
        "tpot": {f"p{p}": percentile(recorder.tpot, p) for p in (50, 90, 99)},
        "itl": {f"p{p}": recorder.itl(p) for p in (50, 90, 99)},
        "output_tokens_per_s": result.output_rate,
        "prefix_hit_rate": result.hit_rate,
        "busy": result.busy,
        "rejected": recorder.num_rejected,
    }


def as_text(report: dict[str, Any]) -> str:
    """The dictionary of `as_dict`, for a terminal."""
    slo = report["slo"]
    sources = ", ".join(f"TP{tp} {source}" for tp, source in report["step_times"].items())
    lines = [
        f"Goal: {slo['attainment']:.0%} of requests with TTFT <= {slo['ttft']:g} s and "
        f"TPOT <= {slo['tpot']:g} s",
        f"Step times: {sources}; {report['candidates']} layouts, "
        f"{report['simulations']} simulations",
        "",
        f"{'best of each kind':<52}{'GPUs':>5}{'goodput':>9}{'per GPU':>9}{'GPU h':>8}  cost",
        f"{'':<52}{'':>5}{'req/s':>9}{'req/s':>9}{'per M':>8}",
    ]
    for entry in report["layouts"]:
        cost = entry["cost"]
        money = ""
        if "per_hour" in cost:
            money = f"{cost['per_hour']:.2f}/h, {cost['per_million_output_tokens']:.2f} per M"
        lines.append(
            f"{_name(entry['layout']):<52}{entry['gpus']:>5}{entry['goodput']:>9.2f}"
            f"{entry['goodput_per_gpu']:>9.3f}"
            f"{cost['gpu_hours_per_million_output_tokens']:>8.3f}  {money}".rstrip()
        )
    now = report["at_trace_rate"]
    ttft, tpot = now["ttft"], now["tpot"]
    lines += [
        "(M: a million output tokens, at the goodput)",
        "",
        f"The first of them at the trace's {now['rate']:.2f} req/s: "
        f"{now['attainment']:.1%} attain the SLO; TTFT p50 {ttft['p50']:.3f}, "
        f"p99 {ttft['p99']:.3f} s; TPOT p50 {tpot['p50'] * 1e3:.1f}, p99 "
        f"{tpot['p99'] * 1e3:.1f} ms; ITL p99 {now['itl']['p99'] * 1e3:.1f} ms; "
        f"prefix hits {now['prefix_hit_rate']:.1%}; "
        + ", ".join(f"{name} busy {share:.0%}" for name, share in now["busy"].items()),
    ]
    fewest = report["fewest_gpus"]
    if fewest is None:
        lines.append("No layout holds the trace at its own rate: it needs more GPUs")
    else:
        lines.append(f"Fewest GPUs that hold it: {fewest['gpus']}, as {_name(fewest['layout'])}")
    return "\n".join(lines)


def _name(layout: dict[str, Any]) -> str:
    pools = {
        name: Pool(pool["replicas"], pool["tensor_parallel_size"])
        for name, pool in layout["pools"].items()
    }
    return str(Layout(**pools, max_num_batched_tokens=layout["max_num_batched_tokens"]))


def as_yaml(
    layout: Layout,
    capability: Capability,
    because: str,
    autoscale: Mapping[str, AutoscaleConfig] | None = None,
    switch_roles: bool = False,
) -> str:
    """A file that `pdserve up` takes, with `because` as a comment. What a measured worker had of
    a machine is not known: its resources are left out. `autoscale`: by pool."""
    lines = [f"# {line}" for line in because.splitlines()]
    mode = "disaggregated" if layout.is_disaggregated else "colocated"
    lines += [
        yaml.safe_dump({"model": capability.model, "mode": mode}, sort_keys=False).rstrip(),
        "pools:",
    ]
    for name, pool in layout.pools.items():
        lines += [
            f"  {name}:",
            f"    replicas: {pool.replicas}",
            f"    tensor_parallel_size: {pool.tensor_parallel}",
            f"    engine: {{max_num_seqs: {capability.max_num_seqs}, "
            f"max_num_batched_tokens: {layout.max_num_batched_tokens}}}",
        ]
        if not capability.is_measured:
            lines.append("    resources: {GPU: 1}  # of each rank")
        if autoscale and name in autoscale:
            wanted = autoscale[name].model_dump(exclude_defaults=True)
            shown = ", ".join(f"{key}: {value:g}" for key, value in {"min": 1, **wanted}.items())
            lines.append(f"    autoscale: {{{shown}}}")
        if switch_roles:
            lines.append("    roles: [prefill, decode]")
    return "\n".join(lines) + "\n"
