"""`pdserve compare`: is it worth it to serve prefill and decode apart, for this load, here?

The same load on the same resources: with one pool for both phases, with two pools, and with two
pools whose decode workers prefill short prompts themselves (conditional). The repetitions take
turns, so that a machine that gets slower meanwhile does so for all; every one starts a fresh
deployment, so that no cache is warm. Each repetition has prompts of its own, the same for all
sides.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench import LoadProgress, options_as_json, print_tables, print_warnings, say_plots
from cli.bench_options import (
    AskOptions,
    LoadOptions,
    ResultFiles,
    Warmup,
    result_option,
    run_async,
    spread,
)
from cli.compare_sides import CONDITIONAL_TOKENS, Side, make_sides
from cli.terminal import Reporter, clear_errors
from core.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from loadgen.benchmark import Workload
    from loadgen.chart import LabelledRun
    from loadgen.summary import Slo
    from loadgen.workload import Arrivals

_STATUS_DELAY_S = 1.5  # workers report their counters at least every second
_Overrides = list[str] | None


@spread
def compare(
    config: Annotated[Path, typer.Argument(help="The YAML file of the deployment.")],
    load: LoadOptions,
    ask: AskOptions,
    results: ResultFiles,
    overrides: Annotated[
        _Overrides,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key for all sides. Repeatable."),
    ] = None,
    set_colocated: Annotated[
        _Overrides, typer.Option(metavar="KEY=VALUE", help="Set a key for that side alone.")
    ] = None,
    set_disaggregated: Annotated[
        _Overrides, typer.Option(metavar="KEY=VALUE", help="Of both sides with two pools.")
    ] = None,
    colocated_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Default: as many workers as prefill and decode have together."),
    ] = None,
    conditional: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="router.max_local_prefill_tokens of the third side; 0: no third side. "
            f"Default: the file's, or {CONDITIONAL_TOKENS}.",
        ),  # fmt: skip
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each side, by turns.")] = 3,
    resume: Annotated[
        bool,
        result_option(
            "--resume",
            help="Count the repetitions in the --json file too, if it is there, and add to them.",
        ),
    ] = False,
    markdown_file: Annotated[
        Path | None, result_option("--markdown", help="Write the report.")
    ] = None,
    warmup: Warmup = 4,
) -> None:
    """Is P/D worth it here? The same load colocated, disaggregated and conditional; a verdict."""
    with clear_errors():
        loads = load.loads()
        if len(loads) != 1:
            raise ConfigError("--rate and --concurrency: one value; a comparison is of one load")
        sides = make_sides(
            config, overrides or (), set_colocated or (), set_disaggregated or (),
            colocated_replicas, conditional,
        )  # fmt: skip
        job = Job(
            config, sides, load.workload(), loads[0], load.slo(), ask.checked_endpoint(),
            ask.extra_fields(), ask.timeout, warmup,
        )  # fmt: skip
        first = take_up(job, load, results.json_file) if resume else 0
        was_stopped = run_repetitions(job, repetitions, first)
        finish(job, load, results, markdown_file)
        if was_stopped:
            raise typer.Exit(130)


@dataclass(frozen=True, slots=True)
class Job:
    config_path: Path
    sides: tuple[Side, ...]  # BASE first
    workload: "Workload"
    arrivals: "Arrivals"
    slo: "Slo"
    endpoint: str
    extra: dict[str, Any]
    timeout_s: float
    warmup: int


def take_up(job: Job, load: LoadOptions, path: Path | None) -> int:
    """Gives each side the repetitions that an earlier comparison wrote, without the single
    requests; returns how many. Raises ConfigError if they were of something else."""
    from loadgen.chart import LabelledRun

    if path is None:
        raise ConfigError("--resume: needs --json FILE, which it reads and writes")
    if not path.exists():
        return 0
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sides = {side["name"]: side for side in content["sides"]}
        is_same = content["options"] == options_as_json(load) and all(
            list(side.overrides) == sides[side.name]["overrides"] for side in job.sides
        )
        if not is_same or len(sides) != len(job.sides):
            raise ConfigError(f"--resume: {path} is of another load, or of other sides")
        for side in job.sides:
            for summary in sides[side.name]["repetitions"]:
                side.counters.append(summary.pop("counters"))
                side.runs.append(LabelledRun(side.name, [], summary))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"--resume: {path} is not what compare writes: {error}") from error
    return min(len(side.runs) for side in job.sides)


def run_repetitions(job: Job, repetitions: int, first: int = 0) -> bool:
    """Measures the sides by turns; the order changes each time. Returns whether Ctrl-C ended it
    early; a repetition that it cut short is thrown away."""
    try:
        for repetition in range(first, first + repetitions):
            order = job.sides if repetition % 2 == 0 else job.sides[::-1]
            for side in order:
                run, counters = run_once(job, side, repetition, first + repetitions)
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


def finish(job: Job, load: LoadOptions, results: ResultFiles, markdown_file: Path | None) -> None:
    """Prints and writes the report. Raises UnavailableError if there is nothing to report."""
    from cli.compare_report import Report
    from loadgen.report import write_json, write_text

    if not all(side.runs for side in job.sides):
        raise UnavailableError("stopped before all sides were measured once")
    report = Report.of(job.sides)
    setting = [
        f"load: {job.arrivals}",
        *(f"{side.name}: {side.resources}; {len(side.runs)} repetitions" for side in job.sides),
    ]
    for line in setting:
        print(line)
    print_tables([report.table])
    for line in report.why:
        print(f"- {line}")
    for line in report.headlines:
        print(line)
    if results.json_file is not None:
        write_json(results.json_file, {
            "load": str(job.arrivals),
            "options": options_as_json(load),
            **report.as_json(),
            "sides": [
                {"name": side.name, "overrides": side.overrides, "resources": side.resources,
                 "repetitions": [
                     {**summary, "counters": counters}
                     for summary, counters in zip(side.summaries, side.counters, strict=True)]}
                for side in job.sides
            ],
        })  # fmt: skip
        print(f"wrote {results.json_file}")
    title = f"pdserve compare {job.config_path.name}"
    if markdown_file is not None:
        write_text(markdown_file, report.markdown(title, setting))
        print(f"wrote {markdown_file}")
    if results.plots is not None:
        said = [*report.headlines, *setting, *report.why]
        _write_plots(results.plots, title, said, report.table, job)


def _write_plots(folder: Path, title: str, said: list[str], table: Any, job: Job) -> None:
    from loadgen.chart import LabelledRun, cdf_charts, time_charts
    from loadgen.report import write_plots

    merged = [
        LabelledRun(side.name, [r for run in side.runs for r in run.records], {})
        for side in job.sides
    ]
    charts = cdf_charts(merged) + time_charts([side.runs[-1] for side in job.sides])
    say_plots(folder, write_plots(folder, title, said, [table], charts))
