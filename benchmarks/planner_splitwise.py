"""Splitwise's claim: pools of two kinds of machines at equal cost or power."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.published_row import Row, rows_of, within
from planner.batch_worker import Limits
from planner.deployment import Link
from planner.hardware import find_hardware, find_model, kv_capacity
from planner.layout import Layout, Pool
from planner.result import Result, percentile
from planner.simulate import Machine, simulate
from planner.trace import Trace, TraceRequest, load_trace, sampled

# Times of a request alone on an A100 machine, times these, at p50, p90 and p99 (the paper's SLO).
_TTFT_SLACK, _ITL_SLACK = (2.0, 3.0, 6.0), (1.25, 1.5, 5.0)


@dataclass(frozen=True, slots=True)
class TableModel:
    """Measured points with straight lines between them; beyond the last one the line goes on.

    `prefill`: (prompt tokens, seconds). `decode`: (batch, seconds), whatever the context."""

    prefill_points: Sequence[tuple[float, float]]
    decode_points: Sequence[tuple[float, float]]

    def step(self, new: int, pairs: float, batch: int, kv: int) -> float:
        fixed = self.decode(batch)[0] if batch else 0.0
        return max(_interpolate(self.prefill_points, new + batch), fixed) if new else fixed

    def decode(self, batch: int) -> tuple[float, float]:
        return _interpolate(self.decode_points, batch), 0.0


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    right = min(max(bisect_left(points, (x, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    if x <= x0:
        return y0  # nothing is faster than the smallest that was measured
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class _Design:
    name: str
    layout: Layout
    hardware: dict[str, str]  # by pool


def splitwise(folder: Path) -> Iterator[Row]:
    tables = _splitwise_tables(folder)
    lengths = load_trace(folder / "traces/azure2023_conv.csv.gz").requests
    a100, h100 = "a100", "h100"
    for budget, designs in (
        ("equal cost", (86, 40, (51, 35), (25, 15), (30, 21))),
        ("equal power", (70, 40, (45, 25), (25, 15), (25, 26))),
    ):
        n_a, n_h, aa, hh, ha = designs
        rates = {}
        for design in (
            _Design("Baseline-A100", _one_pool(n_a), {"colocated": a100}),
            _Design("Baseline-H100", _one_pool(n_h), {"colocated": h100}),
            _Design("Splitwise-AA", _two_pools(*aa), {"prefill": a100, "decode": a100}),
            _Design("Splitwise-HH", _two_pools(*hh), {"prefill": h100, "decode": h100}),
            _Design("Splitwise-HA", _two_pools(*ha), {"prefill": h100, "decode": a100}),
        ):
            rates[design.name] = _splitwise_rate(design, tables, lengths)
        numbers = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        best = max(rates[name] for name in rates if name.startswith("Splitwise"))
        gain = best / rates["Baseline-A100"]
        yield (
            f"Splitwise, Llama2-70B, conversation, {budget}: best split over Baseline-A100",
            "2.35x",
            f"{gain:.2f}x; req/s: {numbers}",
            within(gain, 2.35, 0.15),
        )
        over = best / rates["Baseline-H100"]
        yield (
            f"the same, {budget}: best split over Baseline-H100",
            "1.4x at 20% lower cost",
            f"{over:.2f}x at equal budget",
            "a gain, another set-up" if over > 1.02 else "no gain here",
        )


def _one_pool(machines: int) -> Layout:
    return Layout(colocated=Pool(machines, 8))


def _two_pools(prefills: int, decodes: int) -> Layout:
    return Layout(Pool(prefills, 8), Pool(decodes, 8))


def _splitwise_tables(folder: Path) -> dict[str, TableModel]:
    """Medians of the measured rows. Prompts at batch 1 only, decode by batch at prompt 512."""
    prefill: dict[tuple[str, int], list[float]] = {}
    decode: dict[tuple[str, int], list[float]] = {}
    for row in rows_of(folder / "perf/splitwise-sim/perf_model.csv"):
        if row["model"] != "llama2-70b" or row["tensor_parallel"] != "8":
            continue
        name = row["hardware"].removesuffix("-80gb")
        prompt, batch = int(row["prompt_size"]), int(row["batch_size"])
        if batch == 1:
            prefill.setdefault((name, prompt), []).append(float(row["prompt_time"]) / 1e3)
        if prompt == 512:
            decode.setdefault((name, batch), []).append(float(row["token_time"]) / 1e3)
    return {
        name: TableModel(_medians(prefill, name), _medians(decode, name))
        for name in ("a100", "h100")
    }


def _medians(
    groups: dict[tuple[str, int], list[float]], name: str
) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(x), median(v)) for (n, x), v in groups.items() if n == name))


def _splitwise_rate(
    design: _Design, tables: dict[str, TableModel], lengths: Sequence[TraceRequest]
) -> float:
    """The highest Poisson rate at which all six percentiles hold."""
    shape = find_model("llama-2-70b")
    machine = Machine(
        model_of=lambda name, _: tables[design.hardware[name]],
        # The table ends at a batch of 64; beyond that its last line goes on.
        limits_of=lambda name, tp: Limits(
            kv_capacity(find_hardware(design.hardware[name]), shape, tp), max_num_seqs=256
        ),
        link_of=lambda _: Link(25e9, 0.005, shape.kv_bytes_per_token),
    )
    alone = tables["a100"]

    def holds(rate: float) -> bool:
        trace = sampled(lengths, max(2000, int(rate * 60)), rate)
        result = simulate(design.layout, machine, trace)
        return _meets_slowdowns(result, trace, alone)

    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _meets_slowdowns(result: Result, trace: Trace, alone: TableModel) -> bool:
    recorder = result.recorder
    ttft = [
        measured / alone.step(trace.requests[index].num_prompt, 0.0, 0, 0)
        for index, measured in zip(recorder.indices, recorder.ttft, strict=True)
    ]
    fastest = alone.decode(1)[0]
    return all(
        percentile(ttft, p) <= ttft_slack and recorder.itl(p) <= itl_slack * fastest
        for p, ttft_slack, itl_slack in zip((50, 90, 99), _TTFT_SLACK, _ITL_SLACK, strict=True)
    )
