"""Numbers out of records.

Percentiles interpolate between ranks, as numpy's do. TTFT, TPOT and ITL are defined in
`loadgen.record`; those of failed and of interrupted requests are counted nowhere. Throughput is
what finished requests brought, over the time from the first sending to the last token. Goodput is
the requests that met every SLO given, over the same time; TTFT then counts from the *scheduled*
arrival, so that waiting in the client is not forgiven.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.record import RequestRecord
from loadgen.runner import RunResult

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
# Above these the client itself is part of what was measured.
CPU_LIMIT = 0.8
LAG_LIMIT_S = 0.02
DELAY_LIMIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds that a good request meets; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_given(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def is_met_by(self, record: RequestRecord) -> bool:
        """A request of a single token has no TPOT and cannot miss it."""
        if not record.is_ok:
            return False
        if self.ttft_s is not None and record.ttft_scheduled_s > self.ttft_s:
            return False
        tpot = record.tpot_s
        return self.tpot_s is None or tpot is None or tpot <= self.tpot_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between ranks; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> dict[str, float | int | None]:
    """count, mean, min, max and p50 .. p99.9; None where there are no values."""
    found: dict[str, float | int | None] = {"count": len(values)}
    found["mean"] = sum(values) / len(values) if values else None
    for percent in PERCENTILES:
        found[f"p{percent:g}"] = percentile(values, percent) if values else None
    found["min"] = min(values, default=None)
    found["max"] = max(values, default=None)
    return found


def summarize(result: RunResult, slo: Slo = Slo()) -> dict[str, Any]:
    """All numbers of one run, times in seconds, JSON-ready."""
    ended = [record for record in result.records if not record.is_interrupted]
    good = [record for record in ended if record.is_ok]
    duration = _duration(good, result)
    num_in = sum(record.num_prompt_tokens for record in good)
    num_out = sum(record.num_output_tokens for record in good)
    summary: dict[str, Any] = {
        "requests": {
            "sent": len(result.records),
            "ok": len(good),
            "failed": len(ended) - len(good),
            "interrupted": len(result.records) - len(ended),
            "errors": dict(Counter(r.error for r in ended if r.error is not None)),
        },
        "duration_s": duration,
        "prompt_tokens": num_in,
        "cached_prompt_tokens": sum(record.cached_tokens or 0 for record in good),
        "output_tokens": num_out,
        "requests_per_s": _rate(len(good), duration),
        "output_tokens_per_s": _rate(num_out, duration),
        "total_tokens_per_s": _rate(num_in + num_out, duration),
        "ttft_s": distribution([record.ttft_s for record in good]),
        "ttft_scheduled_s": distribution([record.ttft_scheduled_s for record in good]),
        "tpot_s": distribution([tpot for r in good if (tpot := r.tpot_s) is not None]),
        "itl_s": distribution([gap for record in good for gap in record.gaps_s]),
        "e2e_s": distribution([record.e2e_s for record in good]),
        "tokens_per_chunk": num_out / max(1, sum(len(r.token_times_s) for r in good)),
        "lengths_off": {
            "prompt": sum(r.num_prompt_tokens != r.wanted_prompt_tokens for r in good),
            "output": sum(r.num_output_tokens != r.wanted_output_tokens for r in good),
        },
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "goodput_per_s": None,
        "slo_attainment": None,
        "client": _client(result, ended),
        "was_stopped": result.was_stopped,
    }
    if slo.is_given:
        num_met = sum(slo.is_met_by(record) for record in good)
        summary["goodput_per_s"] = _rate(num_met, duration)
        summary["slo_attainment"] = num_met / len(ended) if ended else None
    return summary


def warnings(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = []
    client, off, ok = summary["client"], summary["lengths_off"], summary["requests"]["ok"]
    if client["cpu_share"] > CPU_LIMIT:
        found.append(
            f"the client used {client['cpu_share']:.0%} of a core: it was the bottleneck itself, "
            "or close to it; latencies are too high and throughput too low"
        )
    if (client["lag_s"]["p99"] or 0) > LAG_LIMIT_S:
        found.append(
            f"the client's loop ran up to {client['lag_s']['p99'] * 1e3:.0f} ms late (p99): "
            "it shares its cores with others, and latencies include that"
        )
    if (client["send_delay_s"]["p99"] or 0) > DELAY_LIMIT_S:
        found.append(
            f"requests left {client['send_delay_s']['p99'] * 1e3:.0f} ms after their time (p99); "
            "ttft_scheduled counts from the time they were due"
        )
    if ok and off["prompt"]:
        found.append(f"{off['prompt']} of {ok} prompts had another length than asked for")
    if ok and off["output"]:
        found.append(f"{off['output']} of {ok} answers had another length than asked for")
    return found


def _client(result: RunResult, ended: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "cpu_share": result.client.cpu_share,
        "lag_s": distribution(result.client.lags_s),
        "send_delay_s": distribution([record.send_delay_s for record in ended]),
    }


def _duration(good: Sequence[RequestRecord], result: RunResult) -> float:
    if not good:
        return result.elapsed_s
    sent = min(record.sent_s for record in result.records)
    return max(record.token_times_s[-1] for record in good) - sent


def _rate(amount: float, duration: float) -> float | None:
    return amount / duration if duration > 0 else None
