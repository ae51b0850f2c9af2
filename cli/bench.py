"""`pdserve bench`: sends a load to any OpenAI-style server and says what it measured."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench_options import (
    AskOptions,
    LoadOptions,
    ResultFiles,
    Warmup,
    request_option,
    result_option,
    run_async,
    spread,
)
from cli.terminal import clear_errors
from core.errors import ConfigError

if TYPE_CHECKING:
    from loadgen.benchmark import Service, Workload
    from loadgen.chart import LabelledRun
    from loadgen.page import Table
    from loadgen.summary import Slo
    from loadgen.workload import Arrivals


@spread
def bench(
    load: LoadOptions,
    ask: AskOptions,
    results: ResultFiles,
    url: Annotated[
        str | None, typer.Option(help="The server. Default: the pdserve that runs here.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server names.")
    ] = None,
    csv_file: Annotated[
        Path | None, result_option("--csv", help="Write one line for each request.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None,
    prompts: Annotated[
        str,
        request_option(
            help="ids: exact on every model; words: any server. auto: ids where the "
            "server is known to take them."
        ),
    ] = "auto",
    vocab_size: Annotated[
        int | None, request_option(min=2, help="Token ids stay below it. Default: 1000 to 30000.")
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        request_option(
            "--ignore-eos/--no-ignore-eos",
            help="Answers of exactly the asked length. Default: where the server is "
            "known to understand it.",
        ),
    ] = None,
    warmup: Warmup = 1,
) -> None:
    """Measure a server under load: TTFT, TPOT, ITL, throughput, goodput.

    --rate and --concurrency take several values (1,2,4): a sweep."""
    with clear_errors():
        from cli.client import find_url
        from loadgen.benchmark import Service

        if prompts not in ("auto", "ids", "words"):
            raise ConfigError(f"--prompts {prompts}: expected auto, ids or words")
        service = Service(
            find_url(url), model, ask.checked_endpoint(), api_key, ask.extra_fields(),
            ask.timeout, prompts, vocab_size, ignore_eos,  # type: ignore[arg-type]
        )  # fmt: skip
        outputs = Outputs(results.json_file, csv_file, results.plots)
        raise typer.Exit(run_bench(service, load, warmup, outputs))


@dataclass(frozen=True, slots=True)
class Outputs:
    json_file: Path | None = None
    csv_file: Path | None = None
    plots: Path | None = None


def run_bench(service: "Service", options: LoadOptions, warmup: int, outputs: Outputs) -> int:
    """Runs every load, prints and writes what was measured. Returns the exit code: 1 if no
    request succeeded, 130 after Ctrl-C."""
    workload, loads, slo = options.workload(), options.loads(), options.slo()
    runs = run_async(_measure_all(service, workload, loads, slo, warmup))
    tables = _tables(runs)
    print_tables(tables)
    for run in runs:
        print_warnings(run)
    _write(runs, tables, service, options, outputs)
    if not any(run.summary["requests"]["ok"] for run in runs):
        kinds = ", ".join({str(kind) for r in runs for kind in r.summary["requests"]["errors"]})
        detail = next((r.detail for run in runs for r in run.records if r.detail), "")
        print(f"pdserve: error: no request succeeded: {kinds or 'none ended'}"
              f"{f'; the first: {detail}' if detail else ''}", file=sys.stderr)  # fmt: skip
        return 130 if any(run.summary["was_stopped"] for run in runs) else 1
    return 130 if any(run.summary["was_stopped"] for run in runs) else 0


async def _measure_all(
    service: "Service",
    workload: "Workload",
    loads: Sequence["Arrivals"],
    slo: "Slo",
    warmup: int,
) -> "list[LabelledRun]":
    from loadgen.benchmark import measure, prepare

    prepared = await prepare(service, warmup)
    target = prepared.client.target
    print(f"{target.url}, model {target.model}, {target.endpoint}")
    for note in prepared.notes:
        print(f"note: {note}")
    runs: list[LabelledRun] = []
    for number, arrivals in enumerate(loads):
        with LoadProgress(str(arrivals)) as progress:
            run = await measure(
                prepared, workload, arrivals, slo, salt=f".{number}", label=str(arrivals),
                on_start=progress.start, on_done=progress.advance,
            )  # fmt: skip
        runs.append(run)
        if run.summary["was_stopped"]:
            break
    return runs


class LoadProgress:
    """A bar on a terminal; nothing elsewhere. Redrawn four times a second: it is the client's
    core that it would take."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[failed]} failed"),
            Elapsed(),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=None, tokens=0, failed=0)
        self._tokens = self._failed = 0

    def __enter__(self) -> "LoadProgress":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def start(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def advance(self, record: Any) -> None:
        self._tokens += record.num_output_tokens
        self._failed += record.error is not None
        self._progress.update(self._task, advance=1, tokens=self._tokens, failed=self._failed)


def print_tables(tables: Sequence["Table"]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=140)
    for caption, header, rows in tables:
        # As Text: brackets are no markup here.
        table = RichTable(title=Text(caption), title_justify="left", show_header=any(header))
        for place, name in enumerate(header):
            table.add_column(Text(name), justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)


def print_warnings(run: "LabelledRun") -> None:
    from loadgen.summary import warnings

    for warning in warnings(run.summary):
        print(f"warning: {run.label}: {warning}")


def _tables(runs: "Sequence[LabelledRun]") -> "list[Table]":
    from loadgen.report import latency_table, rate_table, sweep_table

    if len(runs) > 1:
        return [sweep_table(runs)]
    return [rate_table(runs[0].summary), latency_table(runs[0].summary)]


def _write(
    runs: "Sequence[LabelledRun]",
    tables: "Sequence[Table]",
    service: "Service",
    options: LoadOptions,
    outputs: Outputs,
) -> None:
    from loadgen.chart import charts_of
    from loadgen.report import latency_table, write_csv, write_json, write_plots
    from loadgen.summary import warnings

    if outputs.json_file is not None:
        write_json(outputs.json_file, {
            "url": service.url,
            "endpoint": service.endpoint,
            "options": options_as_json(options),
            "runs": [{"load": run.label, **run.summary} for run in runs],
        })  # fmt: skip
        print(f"wrote {outputs.json_file}")
    if outputs.csv_file is not None:
        write_csv(outputs.csv_file, runs)
        print(f"wrote {outputs.csv_file}")
    if outputs.plots is not None:
        said = [f"{run.label}: {warning}" for run in runs for warning in warnings(run.summary)]
        more = [latency_table(run.summary) for run in runs] if len(runs) > 1 else []
        axis = "requests at a time" if options.concurrency is not None else "requests/s"
        has_png = write_plots(outputs.plots, f"pdserve bench: {service.url}", said,
                              [*tables, *more], charts_of(runs, axis))  # fmt: skip
        say_plots(outputs.plots, has_png)


def options_as_json(options: LoadOptions) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}


def say_plots(folder: Path, has_png: bool) -> None:
    print(f"wrote {folder / 'report.html'}" + (" and PNGs" if has_png else
          "; for PNGs too: pip install 'pdserve[bench]'"))  # fmt: skip
