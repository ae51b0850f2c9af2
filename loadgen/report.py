"""A run's figures as tables for people, and as JSON and CSV files."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from loadgen.chart import Chart, LabelledRun
from loadgen.page import Table, page
from loadgen.png import write_pngs

_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TTFT from schedule", "ttft_scheduled_s"),
    ("TPOT", "tpot_s"),
    ("ITL", "itl_s"),
    ("E2E", "e2e_s"),
)
_PARTS = ("mean", "p50", "p90", "p99", "p99.9", "max")


def latency_table(summary: dict[str, Any]) -> Table:
    rows = [
        [name, *(_milliseconds(summary[key][part]) for part in _PARTS)] for name, key in _LATENCIES
    ]
    return "Latency in milliseconds", ("", *_PARTS), rows


def rate_table(summary: dict[str, Any]) -> Table:
    requests, client = summary["requests"], summary["client"]
    rows = [
        ["requests ok", f"{requests['ok']} of {requests['sent']}"],
        *(["failed: " + kind, str(count)] for kind, count in requests["errors"].items()),
        *([["interrupted", str(requests["interrupted"])]] if requests["interrupted"] else []),
        ["duration", f"{summary['duration_s']:.2f} s"],
        ["prompt tokens", str(summary["prompt_tokens"])],
        ["of them cached", str(summary["cached_prompt_tokens"])],
        ["output tokens", str(summary["output_tokens"])],
        ["requests/s", number(summary["requests_per_s"])],
        ["output tokens/s", number(summary["output_tokens_per_s"])],
        ["total tokens/s", number(summary["total_tokens_per_s"])],
    ]
    if summary["goodput_per_s"] is not None:
        slo = summary["slo"]
        limits = ", ".join(
            f"{name} <= {slo[key]:g} s"
            for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
            if slo[key] is not None
        )
        share = summary["slo_attainment"]
        rows.append([f"goodput ({limits})", f"{number(summary['goodput_per_s'])} requests/s"])
        rows.append(["SLO attainment", "-" if share is None else f"{share:.1%}"])
    rows.append(["client CPU", f"{client['cpu_share']:.0%} of a core"])
    return "Load", ("", ""), rows


def sweep_table(runs: Sequence[LabelledRun]) -> Table:
    header = ("load", "ok", "requests/s", "goodput", "output tok/s", "TTFT p50", "TTFT p99",
              "TPOT p50", "ITL p99")  # fmt: skip
    rows = []
    for run in runs:
        s = run.summary
        rows.append(
            [
                run.label,
                f"{s['requests']['ok']}/{s['requests']['sent']}",
                number(s["requests_per_s"]),
                number(s["goodput_per_s"]),
                number(s["output_tokens_per_s"]),
                _milliseconds(s["ttft_scheduled_s"]["p50"]),
                _milliseconds(s["ttft_scheduled_s"]["p99"]),
                _milliseconds(s["tpot_s"]["p50"]),
                _milliseconds(s["itl_s"]["p99"]),
            ]
        )
    return "All loads (latencies in milliseconds)", header, rows


def markdown(table: Table) -> str:
    caption, header, rows = table
    lines = [f"**{caption}**", "", "| " + " | ".join(header) + " |"]
    lines.append("|" + "---|" * len(header))
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Raises ConfigError if the file cannot be written."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, runs: Sequence[LabelledRun]) -> None:
    """One line for each request, times in seconds. Raises ConfigError."""
    header = ("run", "index", "scheduled_s", "sent_s", "first_token_s", "ended_s", "prompt_tokens",
              "cached_tokens", "output_tokens", "ttft_s", "ttft_scheduled_s", "tpot_s", "itl_max_s",
              "e2e_s", "error", "detail")  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            for run in runs:
                for r in run.records:
                    times: list[Any] = [None] * 6
                    if r.is_ok:
                        times = [r.token_times_s[0], r.ttft_s, r.ttft_scheduled_s, r.tpot_s,
                                 max(r.gaps_s, default=None), r.e2e_s]  # fmt: skip
                    first, *latencies = times
                    error = "interrupted" if r.is_interrupted else r.error
                    writer.writerow(
                        [run.label, r.index, r.scheduled_s, r.sent_s, first, r.ended_s,
                         r.num_prompt_tokens, r.cached_tokens, r.num_output_tokens, *latencies,
                         error, r.detail]
                    )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_plots(
    folder: Path,
    title: str,
    paragraphs: Sequence[str],
    tables: Sequence[Table],
    charts: Sequence[Chart],
    footer: str = "",
) -> bool:
    """report.html, and a PNG for each chart where matplotlib is installed: returns whether.
    Raises ConfigError if the folder cannot be written."""
    write_text(folder / "report.html", page(title, paragraphs, tables, charts, footer))
    try:
        write_pngs(charts, folder)
    except ImportError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"
