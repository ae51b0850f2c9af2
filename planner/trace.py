"""Request traces: who asks when, for how much, and which prompts share a prefix.

| format | recognised by |
|---|---|
| Azure 2023 CSV | columns TIMESTAMP, ContextTokens, GeneratedTokens |
| Mooncake JSONL | keys timestamp (ms), input_length, output_length, hash_ids (512-token blocks) |
| lengths CSV (ShareGPT, arXiv) | columns num_prefill_tokens, num_decode_tokens; needs a rate |

A name that ends in .gz is unpacked on the way.
"""

import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from core.errors import ConfigError

MOONCAKE_BLOCK = 512
_DAY_S = 86400.0


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
    """Reads a trace; with `rate`, its arrivals become Poisson at that rate. Raises ConfigError
    with the file and line of what is wrong."""
    path = Path(path)
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            head = file.readline()
            file.seek(0)
            trace = _read_mooncake(file, path) if head[:1] == "{" else _read_csv(file, path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not trace.requests:
        raise ConfigError(f"{path}: no request asks for at least one prompt and one output token")
    if rate is not None:
        return trace.poisson(rate, seed)
    if not trace.rate:
        raise ConfigError(f"{path}: has lengths but no arrival times; give a rate")
    return trace


def _read_csv(file: Iterable[str], path: Path) -> Trace:
    rows = csv.DictReader(file)
    columns = set(rows.fieldnames or ())
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        parse = _azure_row
    elif {"num_prefill_tokens", "num_decode_tokens"} <= columns:
        parse = _lengths_row
    else:
        raise ConfigError(f"{path}: not a known trace; its columns are {sorted(columns)}")
    requests = []
    for row in rows:
        try:
            requests.append(parse(row))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{rows.line_num}: {error}") from error
    return _from_zero(requests)


def _azure_row(row: dict[str, str]) -> TraceRequest:
    clock = datetime.fromisoformat(row["TIMESTAMP"][:26])  # it has a digit more than datetime
    seconds = clock.toordinal() * _DAY_S + clock.hour * 3600 + clock.minute * 60
    seconds += clock.second + clock.microsecond / 1e6
    return TraceRequest(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _lengths_row(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))


def _read_mooncake(file: Iterable[str], path: Path) -> Trace:
    requests = []
    names: dict[int, bytes] = {}  # so that equal hashes are one object
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            hashes = tuple(names.setdefault(h, h.to_bytes(8, "little")) for h in row["hash_ids"])
            requests.append(
                TraceRequest(
                    row["timestamp"] / 1e3, row["input_length"], row["output_length"], hashes
                )
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not a Mooncake request: {error}") from error
    return replace(_from_zero(requests), hash_block=MOONCAKE_BLOCK)


def _from_zero(requests: list[TraceRequest]) -> Trace:
    kept = [r for r in requests if r.num_prompt > 0 and r.num_output > 0]
    kept.sort(key=lambda r: r.arrival)
    start = kept[0].arrival if kept else 0.0
    return Trace(
        tuple(TraceRequest(r.arrival - start, r.num_prompt, r.num_output, r.hashes) for r in kept)
    )
