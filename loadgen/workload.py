"""Which requests are sent, and when: a pure function of its options and the seed.

Lengths and arrivals are drawn from streams of their own, so the same seed gives the same requests
at every rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.errors import ConfigError
from loadgen.length import LengthDistribution
from loadgen.record import PlannedRequest, Segment
from loadgen.trace import MOONCAKE_BLOCK, TraceEntry


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come. `concurrency`: a closed loop of so many clients, each of which sends
    its next request when its last has ended. `rate`: an open loop, so many a second whatever the
    server does; the gaps are gamma distributed with shape `burstiness` (1: Poisson; less: more
    bursty), inf sends all at once. Neither: as the trace has it, `speed` times as fast."""

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    speed: float = 1.0

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        if self.rate is None:
            return "the trace's arrivals" + (f" x {self.speed:g}" if self.speed != 1 else "")
        kind = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
        return f"{self.rate:g} requests/s{kind}"


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts. The first `prefix_len` tokens of a prompt are one of `num_prefixes` shared
    ones; at least the last token is the request's own."""

    num_requests: int
    input_len: LengthDistribution
    output_len: LengthDistribution
    prefix_len: int = 0
    num_prefixes: int = 1


def synthetic_requests(spec: Synthetic, seed: int, salt: str = "") -> list[PlannedRequest]:
    """Without arrivals: see `with_arrivals`. Another salt: other texts of the same lengths."""
    rng = np.random.default_rng([seed, 1])
    inputs = spec.input_len.sample(spec.num_requests, rng)
    outputs = spec.output_len.sample(spec.num_requests, rng)
    choices = rng.integers(spec.num_prefixes, size=spec.num_requests)
    requests = []
    for i, (num_in, num_out) in enumerate(zip(inputs, outputs, strict=True)):
        shared = min(spec.prefix_len, num_in - 1)
        prompt = [Segment(f"{seed}{salt}/prefix/{choices[i]}", shared)] if shared > 0 else []
        prompt.append(Segment(f"{seed}{salt}/request/{i}", num_in - max(0, shared)))
        requests.append(PlannedRequest(i, tuple(prompt), num_out))
    return requests


def trace_requests(
    entries: Sequence[TraceEntry], seed: int, salt: str = "", length_scale: float = 1.0
) -> list[PlannedRequest]:
    """A trace's requests with its arrivals, all lengths times `length_scale`. Blocks of equal id
    become equal text, so the trace's shared prefixes are real ones."""
    return [
        PlannedRequest(
            i,
            _trace_prompt(entry, i, f"{seed}{salt}", length_scale),
            max(1, round(entry.num_output_tokens * length_scale)),
            entry.at_s,
        )
        for i, entry in enumerate(entries)
    ]


def _trace_prompt(entry: TraceEntry, index: int, seed: str, scale: float) -> tuple[Segment, ...]:
    total = entry.num_prompt_tokens
    if not entry.block_ids:
        return (Segment(f"{seed}/request/{index}", max(1, round(total * scale))),)
    segments = []
    start = 0
    for position, block in enumerate(entry.block_ids, 1):
        # Edges are scaled, not sizes: the same block starts at the same token in every prompt.
        end = max(1, round(min(position * MOONCAKE_BLOCK, total) * scale))
        if end > start:
            segments.append(Segment(f"{seed}/block/{block}", end - start))
        start = max(start, end)
    return tuple(segments)


def with_arrivals(
    requests: Sequence[PlannedRequest], arrivals: Arrivals, seed: int
) -> list[PlannedRequest]:
    """The requests with their scheduled times, the first at 0. Raises ConfigError for a trace
    that has none of its own."""
    if arrivals.concurrency is not None:
        return [replace(request, at_s=None) for request in requests]
    if arrivals.rate is not None:
        times = arrival_times(len(requests), arrivals.rate, arrivals.burstiness, seed)
        return [replace(r, at_s=at) for r, at in zip(requests, times, strict=True)]
    scheduled = []
    for request in requests:
        if request.at_s is None:
            raise ConfigError("these requests have no arrival times: give --rate or --concurrency")
        scheduled.append(replace(request, at_s=request.at_s / arrivals.speed))
    return scheduled


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds of an open loop's arrivals, the first at 0: gaps of mean 1/rate, gamma distributed
    with shape `burstiness` (their coefficient of variation is 1/sqrt(burstiness))."""
    if np.isinf(rate):
        return [0.0] * count
    rng = np.random.default_rng([seed, 2])
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0.0
    return [float(at) for at in np.cumsum(gaps)]


def prefix_share(requests: Sequence[PlannedRequest]) -> float:
    """Share of all prompt tokens that an infinite prefix cache would have seen before."""
    numbers: dict[tuple[int, Segment], int] = {}  # (number of the head before it, segment)
    hits = total = 0
    for request in requests:
        head = -1
        for segment in request.prompt:
            total += segment.num_tokens
            step = (head, segment)
            if step in numbers:
                hits += segment.num_tokens
            head = numbers.setdefault(step, len(numbers))
    return hits / total if total else 0.0
