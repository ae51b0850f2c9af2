"""Which of two ways to serve wins, and whether that can be said at all.

A difference counts as clear only if it is larger than the noise of the repetitions: every
repetition of the one is better than every repetition of the other, and the medians are at least
`LEAST_CHANGE` apart. With three repetitions each, the first alone happens by chance once in ten
comparisons of equals; the second makes that rarer. With fewer the noise is not known, and nothing
is clear.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

LEAST_CHANGE = 0.05
LEAST_REPETITIONS = 3
# More failures than the other by this share of the requests, and a way cannot win.
FAILURE_LIMIT = 0.01


class Answer(StrEnum):
    """Is the candidate (prefill and decode apart) worth it for this load?"""

    YES = "yes"
    NO = "no"
    TRADE = "trade"  # better here, worse there
    UNCLEAR = "no clear difference"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a summary: `path` leads to it."""

    name: str
    path: tuple[str, ...]
    unit: str
    is_lower_better: bool = True

    def value_in(self, summary: Mapping[str, Any]) -> float | None:
        found: Any = summary
        for key in self.path:
            found = found[key]
        return found


METRICS = (
    Metric("TTFT p50", ("ttft_scheduled_s", "p50"), "ms"),
    Metric("TTFT p99", ("ttft_scheduled_s", "p99"), "ms"),
    Metric("ITL p99", ("itl_s", "p99"), "ms"),
    Metric("TPOT p50", ("tpot_s", "p50"), "ms"),
    Metric("output throughput", ("output_tokens_per_s",), "tokens/s", is_lower_better=False),
    Metric("goodput", ("goodput_per_s",), "requests/s", is_lower_better=False),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric on both sides. `winner`: "base", "candidate" or None, the difference being
    inside the noise. `change`: the candidate's median against the base's, 0.1 = 10 percent
    more."""

    metric: Metric
    base: tuple[float, ...]
    candidate: tuple[float, ...]
    winner: str | None
    change: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Answer
    reason: str  # one sentence
    comparisons: tuple[Comparison, ...]


def compare_metric(metric: Metric, base: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """Neither side may be empty."""
    before, after = median(base), median(candidate)
    change = (after - before) / before if before else None
    winner = None
    is_apart = max(candidate) < min(base) or min(candidate) > max(base)
    is_large = change is None or abs(change) >= LEAST_CHANGE
    is_known = min(len(base), len(candidate)) >= LEAST_REPETITIONS
    if is_known and is_apart and is_large:
        winner = "candidate" if (after < before) == metric.is_lower_better else "base"
    return Comparison(metric, tuple(base), tuple(candidate), winner, change)


def decide(base: Sequence[Mapping[str, Any]], candidate: Sequence[Mapping[str, Any]]) -> Verdict:
    """From the summaries of the repetitions of each. Failures decide first, then goodput where
    SLOs are given, then all metrics together."""
    comparisons = []
    for metric in METRICS:
        values = [[metric.value_in(s) for s in side] for side in (base, candidate)]
        known = [[value for value in side if value is not None] for side in values]
        if all(known):
            comparisons.append(compare_metric(metric, *known))
    answer, reason = _judge(comparisons, _failures(base), _failures(candidate))
    return Verdict(answer, reason, tuple(comparisons))


def _judge(
    comparisons: Sequence[Comparison], base_failed: float, candidate_failed: float
) -> tuple[Answer, str]:
    failed = f"{candidate_failed:.1%} of its requests failed, against {base_failed:.1%}"
    if candidate_failed > base_failed + FAILURE_LIMIT:
        return Answer.NO, failed
    if base_failed > candidate_failed + FAILURE_LIMIT:
        return Answer.YES, failed
    goodput = next((c for c in comparisons if c.metric.name == "goodput"), None)
    if goodput is not None and goodput.winner is not None:
        answer = Answer.YES if goodput.winner == "candidate" else Answer.NO
        return answer, f"goodput decides: {_said(goodput)}"
    better = [c for c in comparisons if c.winner == "candidate"]
    worse = [c for c in comparisons if c.winner == "base"]
    if better and worse:
        return Answer.TRADE, f"better: {_list(better)}; worse: {_list(worse)}"
    if better:
        return Answer.YES, f"better: {_list(better)}; nothing is clearly worse"
    if worse:
        return Answer.NO, f"worse: {_list(worse)}; nothing is clearly better"
    if any(min(len(c.base), len(c.candidate)) < LEAST_REPETITIONS for c in comparisons):
        return Answer.UNCLEAR, f"fewer than {LEAST_REPETITIONS} repetitions show no noise"
    return Answer.UNCLEAR, (
        "every difference is inside the noise of the repetitions or below "
        f"{LEAST_CHANGE:.0%}; the simpler of the two will do"
    )


def _failures(summaries: Sequence[Mapping[str, Any]]) -> float:
    sent = sum(s["requests"]["sent"] - s["requests"]["interrupted"] for s in summaries)
    return sum(s["requests"]["failed"] for s in summaries) / sent if sent else 0.0


def _list(comparisons: Sequence[Comparison]) -> str:
    return ", ".join(_said(comparison) for comparison in comparisons)


def _said(comparison: Comparison) -> str:
    if comparison.change is None:
        return f"{comparison.metric.name} from 0 to {median(comparison.candidate):.3g}"
    return f"{comparison.metric.name} {comparison.change:+.0%}"
