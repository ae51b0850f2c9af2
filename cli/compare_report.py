"""What a comparison says: the table, the verdict, and the numbers behind it."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from loadgen.page import Table
from loadgen.report import markdown, number
from loadgen.verdict import Answer, Comparison, Verdict

_WORKER_COUNTERS = (
    "tokens_prefilled_total",
    "tokens_decoded_total",
    "prefix_hit_tokens_total",
    "kv_bytes_received_total",
    "transfers_ok_total",
    "transfers_failed_total",
    "preemptions_total",
)
_SUMS = {
    "pdserve_kv_transfer_seconds_sum": "kv_transfer_seconds",
    "pdserve_kv_transfer_seconds_count": "kv_transfers",
    'pdserve_queue_time_seconds_sum{phase="prefill"}': "prefill_queue_seconds",
    'pdserve_queue_time_seconds_count{phase="prefill"}': "prefill_queued",
    'pdserve_queue_time_seconds_sum{phase="decode"}': "decode_queue_seconds",
    'pdserve_queue_time_seconds_count{phase="decode"}': "decode_queued",
}
_SAID = {
    Answer.YES: "Yes: for this load, prefill and decode apart are better.",
    Answer.NO: "No: for this load, one pool for both is better.",
    Answer.TRADE: "It is a trade: some things get better apart, others worse.",
    Answer.UNCLEAR: "No clear difference.",
}
Counters = Mapping[str, float]


def read_counters(cluster: Mapping[str, Any], metrics: str) -> dict[str, float]:
    """Sums over all workers of /cluster, and sums of the router's histograms out of /metrics."""
    found: dict[str, float] = {
        name: float(sum(worker.get(name, 0) for worker in cluster["workers"]))
        for name in _WORKER_COUNTERS
    }
    found |= dict.fromkeys(_SUMS.values(), 0.0)
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name in _SUMS:
            found[_SUMS[name]] = float(value)
    return found


def difference(before: Counters, after: Counters) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def headline(verdict: Verdict) -> str:
    return f"{_SAID[verdict.answer]} {verdict.reason[0].upper()}{verdict.reason[1:]}."


def verdict_table(verdict: Verdict, base: str, candidate: str) -> Table:
    """Medians, with the range of the repetitions."""
    names = {"base": base, "candidate": candidate, None: "not clear"}
    rows = []
    for c in verdict.comparisons:
        factor = 1e3 if c.metric.unit == "ms" else 1.0
        change = "-" if c.change is None else f"{c.change:+.1%}"
        rows.append(
            [
                f"{c.metric.name} ({c.metric.unit})",
                _with_range(c.base, factor),
                _with_range(c.candidate, factor),
                change,
                names[c.winner],
            ]
        )
    return "Medians [range] of the repetitions", ("", base, candidate, "change", "better"), rows


def reasons(
    base: Sequence[Mapping[str, Any]],
    candidate: Sequence[Mapping[str, Any]],
    base_counters: Sequence[Counters],
    candidate_counters: Sequence[Counters],
) -> list[str]:
    """Sentences with the numbers that explain a result: shares of the load, prefix hits, KV
    moved, waiting, the worst stalls. Summaries and counters of the repetitions of each."""
    num_in, num_out = _total(base, "prompt_tokens"), _total(base, "output_tokens")
    said = []
    if num_in + num_out:
        shared = mean(summary["prefix_share"] for summary in base)
        said.append(
            f"Prompt tokens are {num_in / (num_in + num_out):.0%} of the load's tokens; "
            f"{shared:.0%} of them repeat a prefix sent before."
        )
        said.append(
            f"Found in prefix caches: {_hit_share(base_counters):.0%} of the prompt tokens "
            f"colocated, {_hit_share(candidate_counters):.0%} apart."
        )
    said += _transfer(candidate, candidate_counters)
    stalls = [max(_values(side, "itl_s", "max"), default=None) for side in (base, candidate)]
    if None not in stalls:
        said.append(
            f"The longest gap between two tokens: {stalls[0] * 1e3:.0f} ms colocated, "  # type: ignore[operator]
            f"{stalls[1] * 1e3:.0f} ms apart."  # type: ignore[operator]
        )
    said.append(
        f"Waiting for a place on a worker, mean: colocated {_queues(base_counters, False)}; "
        f"apart {_queues(candidate_counters, True)}."
    )
    for name, counters in (("colocated", base_counters), ("apart", candidate_counters)):
        preempted = sum(c["preemptions_total"] for c in counters)
        if preempted:
            said.append(f"{preempted:.0f} sequences were preempted {name}: too few KV blocks.")
    return said


def report_markdown(
    title: str, setting: Sequence[str], verdict: Verdict, table: Table, why: Sequence[str]
) -> str:
    lines = [f"# {title}", "", f"**{headline(verdict)}**", ""]
    lines += [f"- {line}" for line in setting]
    lines += ["", markdown(table), "Why:", ""]
    lines += [f"- {line}" for line in why]
    return "\n".join(lines) + "\n"


def comparison_as_json(c: Comparison) -> dict[str, Any]:
    return {
        "metric": c.metric.name,
        "unit": "s" if c.metric.unit == "ms" else c.metric.unit,
        "base": list(c.base),
        "candidate": list(c.candidate),
        "change": c.change,
        "winner": c.winner,
    }


def _transfer(summaries: Sequence[Mapping[str, Any]], counters: Sequence[Counters]) -> list[str]:
    moved = sum(c["kv_bytes_received_total"] for c in counters)
    transfers = sum(c["kv_transfers"] for c in counters)
    seconds = sum(c["kv_transfer_seconds"] for c in counters)
    if not transfers:
        return ["No KV travelled."]
    rate = f", {moved / seconds / 1e9:.2f} GB/s" if seconds else ""
    said = [
        f"KV moved: {moved / transfers / 1e6:.1f} MB and {seconds / transfers * 1e3:.1f} ms of "
        f"transfer a request{rate}; mean TTFT apart is "
        f"{mean(_values(summaries, 'ttft_s', 'mean') or [0.0]) * 1e3:.0f} ms."
    ]
    failed = sum(c["transfers_failed_total"] for c in counters)
    if failed:
        said.append(f"{failed:.0f} hand-overs failed and were made again.")
    return said


def _queues(counters: Sequence[Counters], has_pools: bool) -> str:
    parts = []
    for phase in ("prefill", "decode"):
        count = sum(c[f"{phase}_queued"] for c in counters)
        if count:
            waited = sum(c[f"{phase}_queue_seconds"] for c in counters)
            what = f" for {phase}" if has_pools else ""
            parts.append(f"{waited / count * 1e3:.0f} ms{what}")
    return ", ".join(parts) or "not reported"


def _hit_share(counters: Sequence[Counters]) -> float:
    hits = sum(c["prefix_hit_tokens_total"] for c in counters)
    computed = sum(c["tokens_prefilled_total"] for c in counters)
    return hits / (hits + computed) if hits + computed else 0.0


def _total(summaries: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(summary[key] for summary in summaries)


def _values(summaries: Sequence[Mapping[str, Any]], key: str, part: str) -> list[float]:
    return [s[key][part] for s in summaries if s[key][part] is not None]


def _with_range(values: Sequence[float], factor: float) -> str:
    low, middle, high = min(values) * factor, median(values) * factor, max(values) * factor
    return f"{number(middle)} [{number(low)}, {number(high)}]"
