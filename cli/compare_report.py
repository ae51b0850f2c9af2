"""What a comparison says: the table, the verdict, and the numbers behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import Any, Protocol

from loadgen.page import Table
from loadgen.report import markdown, number
from loadgen.verdict import Answer, Comparison, Verdict, decide

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
    'pdserve_decisions_total{decision="local"}': "decided_local",
    'pdserve_decisions_total{decision="disaggregated"}': "decided_disaggregated",
}
# `{0}` is what is asked about, `{1}` what it is compared with.
_SAID = {
    Answer.YES: "Yes: for this load, {0} is better than {1}.",
    Answer.NO: "No: for this load, {0} is worse than {1}.",
    Answer.TRADE: "A trade: {0} is better than {1} in some things, worse in others.",
    Answer.UNCLEAR: "No clear difference between {0} and {1}.",
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


class Measured(Protocol):
    """One way to serve: its repetitions, and what the counters gained in each."""

    name: str

    @property
    def summaries(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def counters(self) -> Sequence[Counters]: ...


@dataclass(frozen=True, slots=True)
class Pairing:
    """`candidate` against `base`, by name."""

    candidate: str
    base: str
    verdict: Verdict

    @property
    def headline(self) -> str:
        said, reason = _SAID[self.verdict.answer], self.verdict.reason
        return f"{said.format(self.candidate, self.base)} {reason[0].upper()}{reason[1:]}."


@dataclass(frozen=True, slots=True)
class Report:
    """Each way against each that stands before it. `best`: by metric, whom nobody clearly
    beats."""

    pairings: tuple[Pairing, ...]
    table: Table
    why: list[str]

    @classmethod
    def of(cls, sides: Sequence[Measured]) -> "Report":
        """The first is the base of the question; each was measured once at least."""
        pairings = tuple(
            Pairing(later.name, earlier.name, decide(earlier.summaries, later.summaries))
            for earlier, later in combinations(sides, 2)
        )
        return cls(pairings, _table([side.name for side in sides], pairings), reasons(sides))

    @property
    def headlines(self) -> list[str]:
        return [pairing.headline for pairing in self.pairings]

    def markdown(self, title: str, setting: Sequence[str]) -> str:
        lines = [f"# {title}", "", *(f"**{line}**\n" for line in self.headlines)]
        lines += [f"- {line}" for line in setting]
        lines += ["", markdown(self.table), "Why:", ""]
        lines += [f"- {line}" for line in self.why]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {
            "verdicts": [
                {
                    "candidate": p.candidate,
                    "base": p.base,
                    "answer": p.verdict.answer.value,
                    "reason": p.verdict.reason,
                    "comparisons": [comparison_as_json(c) for c in p.verdict.comparisons],
                }
                for p in self.pairings
            ],
            "why": self.why,
        }


def _table(names: Sequence[str], pairings: Sequence[Pairing]) -> Table:
    """Medians with the range of the repetitions, and the change against the first."""
    rows = []
    first = pairings[0].verdict
    for metric in [c.metric for c in first.comparisons]:
        compared = {
            (p.candidate, p.base): c
            for p in pairings
            for c in p.verdict.comparisons
            if c.metric == metric
        }
        factor = 1e3 if metric.unit == "ms" else 1.0
        row = [f"{metric.name} ({metric.unit})"]
        for name in names[1:]:
            c = compared.get((name, names[0]))
            if c is None:
                row += ["-"]
                continue
            if len(row) == 1:
                row.append(_with_range(c.base, factor))
            change = "" if c.change is None else f", {c.change:+.0%}"
            row.append(_with_range(c.candidate, factor) + change)
        rows.append([*row, _best(names, compared)])
    return "Medians [range] of the repetitions", ("", *names, "best"), rows


def _best(names: Sequence[str], compared: Mapping[tuple[str, str], Comparison]) -> str:
    beaten = {
        candidate if c.winner == "base" else base
        for (candidate, base), c in compared.items()
        if c.winner is not None
    }
    return ", ".join(name for name in names if name not in beaten) if beaten else "not clear"


def reasons(sides: Sequence[Measured]) -> list[str]:
    """Sentences with the numbers that explain a result: shares of the load, prefix hits, KV
    moved, waiting, the worst stalls."""
    base = sides[0].summaries
    num_in, num_out = _total(base, "prompt_tokens"), _total(base, "output_tokens")
    said = []
    if num_in + num_out:
        shared = mean(summary["prefix_share"] for summary in base)
        hits = ", ".join(f"{_hit_share(side.counters):.0%} {side.name}" for side in sides)
        said += [
            f"Prompt tokens are {num_in / (num_in + num_out):.0%} of the load's tokens; "
            f"{shared:.0%} of them repeat a prefix sent before.",
            f"Found in prefix caches, of the prompt tokens: {hits}.",
        ]
    said += [line for side in sides[1:] for line in (*_decided(side), *_transfer(side))]
    stalls = {s.name: max(_values(s.summaries, "itl_s", "max"), default=None) for s in sides}
    known = ", ".join(f"{v * 1e3:.0f} ms {name}" for name, v in stalls.items() if v is not None)
    if known:
        said.append(f"The longest gap between two tokens: {known}.")
    waits = "; ".join(f"{side.name} {_queues(side.counters)}" for side in sides)
    said.append(f"Waiting for a place on a worker, mean: {waits}.")
    for side in sides:
        preempted = sum(c["preemptions_total"] for c in side.counters)
        if preempted:
            said.append(f"{preempted:.0f} sequences were preempted {side.name}: too few KV blocks.")
    return said


def comparison_as_json(c: Comparison) -> dict[str, Any]:
    return {
        "metric": c.metric.name,
        "unit": "s" if c.metric.unit == "ms" else c.metric.unit,
        "base": list(c.base),
        "candidate": list(c.candidate),
        "change": c.change,
        "winner": c.winner,
    }


def _decided(side: Measured) -> list[str]:
    local = sum(c["decided_local"] for c in side.counters)
    if not local:
        return []
    apart = sum(c["decided_disaggregated"] for c in side.counters)
    return [f"Prompts computed on the decode worker, {side.name}: {local / (local + apart):.0%}."]


def _transfer(side: Measured) -> list[str]:
    moved = sum(c["kv_bytes_received_total"] for c in side.counters)
    transfers = sum(c["kv_transfers"] for c in side.counters)
    seconds = sum(c["kv_transfer_seconds"] for c in side.counters)
    if not transfers:
        return []
    rate = f", {moved / seconds / 1e9:.2f} GB/s" if seconds else ""
    said = [
        f"KV moved, {side.name}: {moved / transfers / 1e6:.1f} MB and "
        f"{seconds / transfers * 1e3:.1f} ms of transfer a hand-over{rate}; mean TTFT is "
        f"{mean(_values(side.summaries, 'ttft_s', 'mean') or [0.0]) * 1e3:.0f} ms."
    ]
    failed = sum(c["transfers_failed_total"] for c in side.counters)
    if failed:
        said.append(f"{failed:.0f} hand-overs failed and were made again.")
    return said


def _queues(counters: Sequence[Counters]) -> str:
    parts = []
    for phase in ("prefill", "decode"):
        count = sum(c[f"{phase}_queued"] for c in counters)
        if count:
            waited = sum(c[f"{phase}_queue_seconds"] for c in counters)
            parts.append(f"{waited / count * 1e3:.0f} ms for {phase}")
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
