"""`pdserve compare`: is it worth it to serve prefill and decode apart, for this load, here?

The same load on the same resources, once with one pool for both phases and once with two pools.
The repetitions alternate, so that a machine that gets slower meanwhile does so for both; every
one starts a fresh deployment, so that no cache is warm. Each repetition has prompts of its own,
the same for both sides.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench import LoadProgress, options_as_json, print_tables, print_warnings, say_plots
from cli.bench_options import (
    Burstiness,
    Concurrency,
    Endpoint,
    Extra,
    InputLen,
    JsonFile,
    LengthScale,
    LoadOptions,
    MaxRequests,
    NumPrefixes,
    NumRequests,
    OutputLen,
    Plots,
    PrefixLen,
    Rate,
    Seed,
    SloTpot,
    SloTtft,
    Timeout,
    Trace,
    TraceScale,
    Warmup,
    parse_endpoint,
    parse_extra,
    run_async,
)
from cli.terminal import Reporter, clear_errors
from core.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from core.config import Config
    from loadgen.benchmark import Workload
    from loadgen.chart import LabelledRun
    from loadgen.summary import Slo
    from loadgen.workload import Arrivals

BASE, CANDIDATE = "colocated", "disaggregated"
_STATUS_DELAY_S = 1.5  # workers report their counters at least every second
_Overrides = list[str] | None


def compare(
    config: Annotated[Path, typer.Argument(help="The YAML file of the deployment.")],
    overrides: Annotated[
        _Overrides,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key for both sides. Repeatable."),
    ] = None,
    set_colocated: Annotated[
        _Overrides, typer.Option(metavar="KEY=VALUE", help="Set a key for that side alone.")
    ] = None,
    set_disaggregated: Annotated[
        _Overrides, typer.Option(metavar="KEY=VALUE", help="Set a key for that side alone.")
    ] = None,
    colocated_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Default: as many workers as prefill and decode have together."),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each side, alternating.")] = 3,
    num_requests: NumRequests = 100,
    concurrency: Concurrency = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    input_len: InputLen = "256",
    output_len: OutputLen = "64",
    prefix_len: PrefixLen = 0,
    num_prefixes: NumPrefixes = 1,
    trace: Trace = None,
    trace_scale: TraceScale = 1.0,
    length_scale: LengthScale = 1.0,
    max_requests: MaxRequests = None,
    seed: Seed = 0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    json_file: JsonFile = None,
    markdown_file: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write the report.", rich_help_panel="Results"),
    ] = None,
    plots: Plots = None,
    endpoint: Endpoint = "completions",
    extra: Extra = None,
    warmup: Warmup = 4,
    timeout: Timeout = 600.0,
) -> None:
    """Is P/D worth it here? The same load, colocated and disaggregated, and a verdict."""
    with clear_errors():
        options = LoadOptions(
            num_requests, concurrency, rate, burstiness, input_len, output_len, prefix_len,
            num_prefixes, trace, trace_scale, length_scale, max_requests, seed, slo_ttft, slo_tpot,
        )  # fmt: skip
        loads = options.loads()
        if len(loads) != 1:
            raise ConfigError("--rate and --concurrency: one value; a comparison is of one load")
        sides = make_sides(
            config, overrides or (), set_colocated or (), set_disaggregated or (),
            colocated_replicas,
        )  # fmt: skip
        job = Job(
            config, sides, options.workload(), loads[0], options.slo(), parse_endpoint(endpoint),
            parse_extra(extra), timeout, warmup,
        )  # fmt: skip
        was_stopped = run_repetitions(job, repetitions)
        outputs = ReportFiles(json_file, markdown_file, plots)
        finish(job, options, outputs)
        if was_stopped:
            raise typer.Exit(130)


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


@dataclass(frozen=True, slots=True)
class Job:
    config_path: Path
    sides: tuple[Side, Side]  # BASE, CANDIDATE
    workload: "Workload"
    arrivals: "Arrivals"
    slo: "Slo"
    endpoint: str
    extra: dict[str, Any]
    timeout_s: float
    warmup: int


@dataclass(frozen=True, slots=True)
class ReportFiles:
    json_file: Path | None = None
    markdown_file: Path | None = None
    plots: Path | None = None


def make_sides(
    path: Path,
    overrides: Sequence[str],
    for_colocated: Sequence[str],
    for_disaggregated: Sequence[str],
    colocated_replicas: int | None,
) -> tuple[Side, Side]:
    """Both deployments out of one file. A file that says nothing of pools.colocated gets as many
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
    candidate = [*overrides, "mode=disaggregated", *for_disaggregated]
    return (
        Side(BASE, tuple(base), resources_of(load_config(path, base))),
        Side(CANDIDATE, tuple(candidate), resources_of(load_config(path, candidate))),
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


def run_repetitions(job: Job, repetitions: int) -> bool:
    """Measures both sides by turns; the order changes each time. Returns whether Ctrl-C ended it
    early; a repetition that it cut short is thrown away."""
    try:
        for repetition in range(repetitions):
            order = job.sides if repetition % 2 == 0 else job.sides[::-1]
            for side in order:
                run, counters = run_once(job, side, repetition, repetitions)
                if run.summary["was_stopped"]:
                    return True
                side.runs.append(run)
                side.counters.append(counters)
    except KeyboardInterrupt:
        return True
    return False


def run_once(
    job: Job, side: Side, repetition: int, repetitions: int
) -> "tuple[LabelledRun, dict[str, float]]":
    """One fresh deployment, one measured load, and what its counters gained by it."""
    from cli.compare_report import difference, read_counters
    from cli.deployed import deployed

    title = f"{side.name}, {repetition + 1} of {repetitions}"
    with tempfile.TemporaryDirectory(prefix="pdserve-compare-") as folder, Reporter() as reporter:
        log = Path(folder) / "up.log"
        reporter.doing(f"{title}: starting")
        try:
            with deployed(job.config_path, side.overrides, log) as running:
                running.wait_ready()
                reporter.rest()
                run, before = run_async(_measure(job, side, repetition, title, running))
                time.sleep(_STATUS_DELAY_S)
                after = read_counters(running.cluster(), running.metrics())
                reporter.doing(f"{title}: stopping")
        except UnavailableError as error:
            raise UnavailableError(f"{title}: {error}") from error
        ok = run.summary["requests"]
        reporter.done(f"{title}: {ok['ok']} of {ok['sent']} requests")
    print_warnings(run)
    return run, difference(before, after)


async def _measure(
    job: Job, side: Side, repetition: int, title: str, running: Any
) -> "tuple[LabelledRun, dict[str, float]]":
    import asyncio

    from cli.compare_report import read_counters
    from loadgen.benchmark import Service, measure, prepare

    service = Service(running.url, endpoint=job.endpoint, extra=job.extra, timeout_s=job.timeout_s)
    prepared = await prepare(service, job.warmup)
    await asyncio.sleep(_STATUS_DELAY_S)
    before = read_counters(running.cluster(), running.metrics())
    with LoadProgress(title) as progress:
        run = await measure(
            prepared, job.workload, job.arrivals, job.slo, salt=f".{repetition}", label=side.name,
            on_start=progress.start, on_done=progress.advance,
        )  # fmt: skip
    return run, before


def finish(job: Job, options: LoadOptions, outputs: ReportFiles) -> None:
    """Prints and writes the report. Raises UnavailableError if there is nothing to report."""
    from cli.compare_report import (
        comparison_as_json,
        headline,
        reasons,
        report_markdown,
        verdict_table,
    )
    from loadgen.report import write_json, write_text
    from loadgen.verdict import decide

    base, candidate = job.sides
    if not base.runs or not candidate.runs:
        raise UnavailableError("stopped before both sides were measured once")
    verdict = decide(base.summaries, candidate.summaries)
    table = verdict_table(verdict, base.name, candidate.name)
    why = reasons(base.summaries, candidate.summaries, base.counters, candidate.counters)
    setting = [
        f"load: {job.arrivals}",
        *(f"{side.name}: {side.resources}; {len(side.runs)} repetitions" for side in job.sides),
    ]
    for line in setting:
        print(line)
    print_tables([table])
    for line in why:
        print(f"- {line}")
    print(headline(verdict))
    if outputs.json_file is not None:
        write_json(outputs.json_file, {
            "answer": verdict.answer.value,
            "reason": verdict.reason,
            "comparisons": [comparison_as_json(c) for c in verdict.comparisons],
            "why": why,
            "load": str(job.arrivals),
            "options": options_as_json(options),
            "sides": [
                {"name": side.name, "overrides": side.overrides, "resources": side.resources,
                 "repetitions": [
                     {**summary, "counters": counters}
                     for summary, counters in zip(side.summaries, side.counters, strict=True)]}
                for side in job.sides
            ],
        })  # fmt: skip
        print(f"wrote {outputs.json_file}")
    title = f"pdserve compare {job.config_path.name}"
    if outputs.markdown_file is not None:
        write_text(outputs.markdown_file, report_markdown(title, setting, verdict, table, why))
        print(f"wrote {outputs.markdown_file}")
    if outputs.plots is not None:
        _write_plots(outputs.plots, title, [headline(verdict), *setting, *why], table, job)


def _write_plots(folder: Path, title: str, said: list[str], table: Any, job: Job) -> None:
    from loadgen.chart import LabelledRun, cdf_charts, time_charts
    from loadgen.report import write_plots

    merged = [
        LabelledRun(side.name, [r for run in side.runs for r in run.records], {})
        for side in job.sides
    ]
    charts = cdf_charts(merged) + time_charts([side.runs[0] for side in job.sides])
    say_plots(folder, write_plots(folder, title, said, [table], charts))
