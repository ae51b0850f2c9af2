"""A trace as the simulation uses it: who asks when, for how much, and which prompts share a
prefix."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.errors import ConfigError
from loadgen.trace import MOONCAKE_BLOCK, read_trace


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival: float  # seconds since the first one
    num_prompt: int
    num_output: int
    hashes: tuple[bytes, ...] = ()  # one for each block of the prompt; the last may be partial


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival. `hash_block` is the number of tokens behind one hash; 0:
    nothing is known about prefixes."""

    requests: tuple[TraceRequest, ...]
    hash_block: int = 0

    @property
    def rate(self) -> float:
        """Requests a second."""
        span = self.requests[-1].arrival if self.requests else 0.0
        return (len(self.requests) - 1) / span if span > 0 else 0.0

    def first(self, count: int) -> "Trace":
        return replace(self, requests=self.requests[:count])

    def repeated(self, count: int) -> "Trace":
        """The first `count` requests of the trace run again and again. Each lap has prefixes of
        its own: a repetition must not look like a hot cache."""
        if count <= len(self.requests):
            return self.first(count)
        lap_s = self.requests[-1].arrival * (1 + 1 / len(self.requests))
        requests = []
        for index in range(count):
            lap, place = divmod(index, len(self.requests))
            r = self.requests[place]
            mark = lap.to_bytes(2, "big")
            hashes = tuple(h + mark for h in r.hashes) if lap else r.hashes
            requests.append(
                TraceRequest(r.arrival + lap * lap_s, r.num_prompt, r.num_output, hashes)
            )
        return replace(self, requests=tuple(requests))

    def at_rate(self, rate: float) -> "Trace":
        """The same requests with the gaps stretched or shrunk to a mean rate."""
        if not self.rate:
            raise ConfigError("the trace has no arrival times to scale; give a rate")
        factor = self.rate / rate
        return replace(
            self,
            requests=tuple(
                TraceRequest(r.arrival * factor, r.num_prompt, r.num_output, r.hashes)
                for r in self.requests
            ),
        )

    def poisson(self, rate: float, seed: int = 0) -> "Trace":
        """The same requests in the same order, arriving at random."""
        return replace(self, requests=tuple(_poisson(self.requests, rate, seed)))


def sampled(lengths: Sequence[TraceRequest], count: int, rate: float, seed: int = 0) -> Trace:
    """`count` requests drawn from `lengths` with replacement, arriving at random."""
    dice = random.Random(f"lengths {seed}")
    return Trace(tuple(_poisson(dice.choices(lengths, k=count), rate, seed)))


def _poisson(requests: Iterable[TraceRequest], rate: float, seed: int) -> Iterator[TraceRequest]:
    dice, now = random.Random(f"arrivals {seed}"), 0.0
    for request in requests:
        yield TraceRequest(now, request.num_prompt, request.num_output, request.hashes)
        now += dice.expovariate(rate)


def load_trace(path: str | Path, rate: float | None = None, seed: int = 0) -> Trace:
    """Reads any format that `loadgen.trace` knows; with `rate`, arrivals become Poisson at that
    rate. Raises ConfigError with the file and line of what is wrong."""
    entries = read_trace(Path(path))
    names: dict[int, bytes] = {}  # so that equal blocks share one object
    requests = tuple(
        TraceRequest(
            entry.at_s or 0.0,
            entry.num_prompt_tokens,
            entry.num_output_tokens,
            tuple(
                names.setdefault(b, b.to_bytes(8, "little", signed=True)) for b in entry.block_ids
            ),
        )
        for entry in entries
    )
    trace = Trace(requests, MOONCAKE_BLOCK if names else 0)
    if rate is not None:
        return trace.poisson(rate, seed)
    if not trace.rate:
        raise ConfigError(f"{path}: has lengths but no arrival times; give a rate")
    return trace
