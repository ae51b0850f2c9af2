"""`pdserve plan`: which pools serve a trace best, by simulation."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.terminal import Reporter
from core.config import parse_config
from core.errors import ConfigError
from planner import autoscaled
from planner.autoscaled import Bounds, Study
from planner.layout import Layout
from planner.machines import Capability, build
from planner.report import as_dict, as_text, as_yaml
from planner.result import Slo
from planner.search import Goal, Searcher
from planner.simulate import Options
from planner.trace import Trace, load_trace


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What was typed. `seconds` and `requests`: how much is simulated at each rate, at least."""

    trace: Path
    hardware: str  # a name, or a file of `pdserve profile`
    model: str | None
    slo: Slo
    gpus: int
    attainment: float = 0.9
    rate: float | None = None
    seconds: float = 60.0
    requests: int = 1000
    cost_per_gpu_hour: float | None = None
    policy: str = "kv_aware"
    seed: int = 0
    exact: bool = False
    as_json: bool = False
    out: Path | None = None
    autoscale: str | None = None  # "MIN..MAX" workers of each pool
    switch_roles: bool = False


def run_plan(options: PlanOptions) -> None:
    """Prints the plan, and writes the deployment's YAML if asked to. Raises ConfigError."""
    if options.as_json:
        _run(options, lambda _: None)
        return
    with Reporter() as reporter:
        # On a pipe each activity is a line of its own, and these are many.
        _run(options, reporter.doing if reporter.console.is_terminal else lambda _: None)
        reporter.rest()


def _run(options: PlanOptions, say: Callable[[str], None]) -> None:
    trace = load_trace(options.trace, options.rate, options.seed)
    if not trace.rate:
        raise ConfigError(f"{options.trace}: all requests arrive at once; give a --rate")
    capability = build(options.hardware, options.model, options.gpus)
    if not capability.degrees:
        raise ConfigError(f"{capability.model} does not fit on {options.gpus} x {options.hardware}")
    goal = Goal(options.slo, options.attainment, options.seconds, options.requests)
    bounds = _bounds(options)
    searcher = Searcher(
        capability,
        trace,
        goal,
        Options(options.policy, options.exact, options.seed, holds_back=True),
    )
    plan = searcher.plan(options.gpus, say)
    if not plan.best:
        raise ConfigError(
            "no layout meets the SLO at any rate: its times are shorter than a lone request's "
            f"on {options.gpus} x {options.hardware}"
        )
    best = plan.best[0]
    if options.switch_roles:  # between two pools, also where one would do better
        best = next((found for found in plan.best if found.layout.is_disaggregated), best)
    at_rate = searcher.run(best.layout, trace.rate)
    report = as_dict(plan, at_rate, capability, goal, trace.rate, options.cost_per_gpu_hour)
    study = None
    if bounds is not None:
        study = _study(options, best.layout, capability, trace, goal, bounds, say)
        report["autoscale"] = autoscaled.as_dict(study, goal, options.cost_per_gpu_hour)
    config = as_yaml(
        best.layout if study is None else study.start,
        capability,
        f"pdserve plan: {best.layout} on {Path(options.hardware).name}.\n"
        f"Predicted goodput {best.goodput:.2f} requests/s ({best.per_gpu:.3f} for each GPU) at "
        f"TTFT {goal.slo.ttft:g} s, TPOT {goal.slo.tpot:g} s, {goal.attainment:.0%}.",
        {} if study is None else study.configs,
        options.switch_roles,
    )
    parse_config(config, source="the plan")  # never hand out what `up` would refuse
    if options.out is not None:
        try:
            options.out.write_text(config, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {options.out}: {error.strerror}") from error
    if options.as_json:
        print(json.dumps({**report, "config": config}, indent=2))
    else:
        print(as_text(report))
        if study is not None:
            print(autoscaled.as_text(report["autoscale"]))
        print(f"\nWritten to {options.out}" if options.out is not None else f"\n{config}", end="")


def _bounds(options: PlanOptions) -> Bounds | None:
    """Raises ConfigError."""
    if options.autoscale is None:
        if options.switch_roles:
            raise ConfigError("--switch-roles: expected --autoscale MIN..MAX with it")
        return None
    least, dots, most = options.autoscale.partition("..")
    is_pair = bool(dots) and all(n.isascii() and n.isdigit() for n in (least, most))
    if not is_pair or not 1 <= int(least) <= int(most):
        raise ConfigError(
            f"--autoscale {options.autoscale}: expected MIN..MAX workers of each pool, like 1..8"
        )
    return Bounds(int(least), int(most))


def _study(
    options: PlanOptions,
    layout: Layout,
    capability: Capability,
    trace: Trace,
    goal: Goal,
    bounds: Bounds,
    say: Callable[[str], None],
) -> Study:
    gpus = sum(pool.tensor_parallel for pool in layout.pools.values()) * bounds.most
    if gpus > options.gpus:
        raise ConfigError(
            f"--autoscale {options.autoscale}: up to {gpus} GPUs, as {layout}; --gpus allows "
            f"{options.gpus}"
        )
    degrees = {pool.tensor_parallel for pool in layout.pools.values()}
    if options.switch_roles and (len(degrees) > 1 or not layout.is_disaggregated):
        raise ConfigError(
            f"--switch-roles: expected two pools of one tensor-parallel degree, the plan has "
            f"{layout}"
        )
    simulation = Options(options.policy, options.exact, options.seed, switches=options.switch_roles)
    return autoscaled.study(layout, capability.machine, trace, goal, bounds, simulation, say)
