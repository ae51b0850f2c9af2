"""`pdserve top`: the pools, live. Latencies and rates are of the time between two looks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from core import metrics as names

_COLUMNS = ("pool", "ready", "running", "waiting", "KV use", "TTFT p50", "TTFT p90", "TPOT p50",
            "TPOT p90", "tokens/s", "KV/s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """What the router said at one moment."""

    at: float  # of a monotonic clock, in seconds
    cluster: dict[str, Any]
    histograms: dict[str, dict[float, float]]  # by name: cumulative counts by upper bound


def look_at(cluster: dict[str, Any], metrics: str, at: float) -> Look:
    histograms: dict[str, dict[float, float]] = {names.TTFT: {}, names.TPOT: {}}
    for family in text_string_to_metric_families(metrics):
        if family.name in histograms:
            buckets = histograms[family.name]
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return Look(at, cluster, histograms)


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float | None:
    """Of what was observed between two cumulative histograms, linear within a bucket as
    Prometheus has it; None if nothing was."""
    bounds = sorted(after)
    counts = [after[b] - before.get(b, 0.0) for b in bounds]
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    lower, below = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def frame(before: Look, now: Look) -> Group:
    """One table for the pools and a line above it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "pool" else "right", no_wrap=True)
    seconds = max(now.at - before.at, 1e-6)
    old = {w.get("id"): w for w in before.cluster.get("workers", [])}
    pools: dict[str, list[dict[str, Any]]] = {}
    for worker in now.cluster.get("workers", []):
        pools.setdefault(str(worker.get("role")), []).append(worker)
    for pool in ("prefill", "decode", "colocated"):
        if pool in pools:
            table.add_row(*_row(pool, pools[pool], old, seconds, before, now))
    workers = now.cluster.get("workers", [])
    ready = sum(w.get("state") == "ready" for w in workers)
    model = now.cluster.get("model", "")
    title = Text(f"{model}: {ready} of {len(workers)} workers ready", style="bold")
    return Group(title, table)


def _row(
    pool: str,
    workers: list[dict[str, Any]],
    old: dict[Any, dict[str, Any]],
    seconds: float,
    before: Look,
    now: Look,
) -> list[str]:
    def total(key: str) -> int:
        return sum(worker.get(key, 0) for worker in workers)

    def rate(*keys: str) -> float:
        grown = 0
        for worker in workers:
            past = old.get(worker.get("id"), worker)
            same_life = past.get("incarnation") == worker.get("incarnation")
            for key in keys:
                grown += worker.get(key, 0) - (past.get(key, 0) if same_life else 0)
        return max(0, grown) / seconds

    def latency(name: str, q: float, is_shown: bool) -> str:
        value = quantile(before.histograms[name], now.histograms[name], q) if is_shown else None
        return "-" if value is None else f"{value * 1000:.0f} ms"

    blocks = [worker.get("kv_blocks") or {} for worker in workers]
    used = sum(b.get(state, 0) for b in blocks for state in ("running", "held", "awaiting"))
    size = sum(b.get("total", 0) for b in blocks)
    ready = sum(worker.get("state") == "ready" for worker in workers)
    moved = rate("kv_bytes_sent_total", "kv_bytes_received_total") / 1e6
    return [
        pool,
        f"{ready}/{len(workers)}",
        str(total("requests_running")),
        str(total("requests_waiting")),
        f"{used / size:.0%}" if size else "-",
        latency(names.TTFT, 0.5, pool != "decode"),
        latency(names.TTFT, 0.9, pool != "decode"),
        latency(names.TPOT, 0.5, pool != "prefill"),
        latency(names.TPOT, 0.9, pool != "prefill"),
        f"{rate('tokens_prefilled_total', 'tokens_decoded_total'):.0f}",
        f"{moved:.1f} MB" if pool != "colocated" else "-",
    ]


def run_top(look: Callable[[], Look], interval_s: float, count: int | None) -> None:
    """Draws until Ctrl-C, or `count` times. Without a terminal the frames follow each other."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    before = look()
    drawn = 0
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while count is None or drawn < count:
            time.sleep(interval_s)
            now = look()
            picture = frame(before, now)
            if console.is_terminal:
                live.update(picture, refresh=True)
            else:
                console.print(picture)
            before = now
            drawn += 1
