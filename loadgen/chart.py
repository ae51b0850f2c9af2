"""Which pictures a run has. A chart is data; `svg` and `png` draw it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.record import RequestRecord
from loadgen.summary import percentile

Kind = Literal["line", "dots", "spans"]
_MAX_POINTS = 400
_MAX_SPANS = 400
_NUM_WINDOWS = 60
_LEAST_MS = 1.0  # what is shorter came in one piece, and would stretch a logarithmic axis


@dataclass(frozen=True, slots=True)
class Series:
    """`line`, `dots`: points (x, y). `spans`: bars from x to x_end at height y."""

    name: str
    kind: Kind
    x: tuple[float, ...]
    y: tuple[float, ...]
    x_end: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """`name` is also the file's name."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = False


@dataclass(frozen=True, slots=True)
class LabelledRun:
    """One run as pictures need it. `load` is its place on the axis of a sweep."""

    label: str
    records: Sequence[RequestRecord]
    summary: dict[str, Any]
    load: float | None = None


def charts_of(runs: Sequence[LabelledRun], load_label: str = "requests/s") -> list[Chart]:
    """CDFs over all runs, the curves of a sweep if the runs are one, and a course and a timeline
    for each run. Charts without a point are left out."""
    charts = cdf_charts(runs)
    if sum(run.load is not None for run in runs) > 1:
        charts += _sweep(runs, load_label)
    return charts + time_charts(runs)


def cdf_charts(runs: Sequence[LabelledRun]) -> list[Chart]:
    """TTFT, TPOT and ITL, one line for each run."""
    return _with_points(
        [
            _cdf("ttft", "Time to the first token", runs, lambda r: [r.ttft_scheduled_s]),
            _cdf("tpot", "Time per output token", runs, lambda r: _some(r.tpot_s)),
            _cdf("itl", "Gap between tokens", runs, lambda r: r.gaps_s),
        ]
    )


def time_charts(runs: Sequence[LabelledRun]) -> list[Chart]:
    """Latency over time and the timeline of requests, for each run."""
    charts = []
    for number, run in enumerate(runs, 1):
        suffix = f"-{number}" if len(runs) > 1 else ""
        title = f": {run.label}" if len(runs) > 1 else ""
        charts.append(_course(f"latency-over-time{suffix}", title, run))
        charts.append(_timeline(f"timeline{suffix}", title, run))
    return _with_points(charts)


def _with_points(charts: Sequence[Chart]) -> list[Chart]:
    return [chart for chart in charts if any(series.x for series in chart.series)]


def _good(run: LabelledRun) -> list[RequestRecord]:
    return [record for record in run.records if record.is_ok]


def _some(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _cdf(name: str, title: str, runs: Sequence[LabelledRun], values_of: Any) -> Chart:
    series = []
    for run in runs:
        values = sorted(value for record in _good(run) for value in values_of(record))
        last = len(values) - 1
        steps = min(len(values), _MAX_POINTS)
        ranks = [round(i * last / max(1, steps - 1)) for i in range(steps)]
        x = tuple(max(_LEAST_MS, values[rank] * 1e3) for rank in ranks)
        y = tuple(100.0 * (rank + 1) / len(values) for rank in ranks)
        series.append(Series(run.label, "line", x, y))
    return Chart(f"cdf-{name}", f"{title} (CDF)", "milliseconds", "% of all", tuple(series), True)


def _sweep(runs: Sequence[LabelledRun], load_label: str) -> list[Chart]:
    swept = sorted((r for r in runs if r.load is not None), key=lambda run: run.load or 0.0)

    def curve(name: str, key: str, part: str | None, factor: float) -> Series:
        points = []
        for run in swept:
            value = run.summary[key] if part is None else run.summary[key][part]
            if value is not None:
                points.append((run.load or 0.0, value * factor))
        return Series(name, "line", tuple(p[0] for p in points), tuple(p[1] for p in points))

    ttft = [curve(p, "ttft_scheduled_s", p, 1e3) for p in ("p50", "p99")]
    itl = [curve(p, "itl_s", p, 1e3) for p in ("p50", "p99")]
    named = (("requests/s", "requests_per_s"), ("goodput", "goodput_per_s"))
    rates = [curve(name, key, None, 1) for name, key in named]
    return [
        Chart("ttft-over-load", "TTFT over load", load_label, "milliseconds", tuple(ttft)),
        Chart("itl-over-load", "ITL over load", load_label, "milliseconds", tuple(itl)),
        Chart("rate-over-load", "Throughput over load", load_label, "requests/s", tuple(rates)),
    ]


def _course(name: str, title: str, run: LabelledRun) -> Chart:
    """TTFT of each request at its arrival, and the p99 of the gaps by window of time."""
    good = _good(run)
    ttft = Series(
        "TTFT of a request",
        "dots",
        tuple(record.scheduled_s for record in good),
        tuple(record.ttft_scheduled_s * 1e3 for record in good),
    )
    end = max((record.ended_s for record in good), default=0.0)
    width = end / _NUM_WINDOWS
    windows: list[list[float]] = [[] for _ in range(_NUM_WINDOWS + 1)]
    for record in good:
        for at, gap in zip(record.token_times_s[1:], record.gaps_s, strict=True):
            windows[int(at / width)].append(gap)
    filled = [(i, gaps) for i, gaps in enumerate(windows) if gaps]
    gaps_p99 = Series(
        "ITL, p99 of a window",
        "line",
        tuple((i + 0.5) * width for i, _ in filled),
        tuple(percentile(gaps, 99) * 1e3 for _, gaps in filled),
    )
    return Chart(name, f"Latency over time{title}", "seconds", "milliseconds", (ttft, gaps_p99))


def _timeline(name: str, title: str, run: LabelledRun) -> Chart:
    """Each request as two bars: until its first token, and from there to its last."""
    good = sorted(_good(run), key=lambda record: record.scheduled_s)[:_MAX_SPANS]
    rows = tuple(float(row) for row in range(len(good)))
    first = tuple(record.token_times_s[0] for record in good)
    waiting = Series("to the first token", "spans", tuple(r.scheduled_s for r in good), rows, first)
    last = tuple(record.token_times_s[-1] for record in good)
    decoding = Series("to the last token", "spans", first, rows, last)
    cut = f", the first {_MAX_SPANS}" if len(_good(run)) > _MAX_SPANS else ""
    return Chart(name, f"Requests{cut}{title}", "seconds", "request", (waiting, decoding))
