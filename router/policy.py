"""Where a request goes: plain functions from a worker's load to a cost; the lowest is chosen.

A policy is a cost for the prefill side, one for the decode side, and one for workers that do both.
Among equal costs the worker that was chosen longest ago wins, so that equals take turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy may know about one worker, this router's own unreported requests included."""

    queued_tokens: int  # prompt tokens that are not computed yet
    num_requests: int  # running and waiting
    free_blocks: int  # free, or cached and nobody's
    total_blocks: int
    max_num_seqs: int
    cached_tokens: int  # of this request, believed to be in its prefix cache
    last_chosen: int  # tick of the last request that was placed there


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs."""

    num_tokens: int  # prompt, and output of earlier attempts
    max_new_tokens: int
    block_size: int


Cost = Callable[[Load, Demand], float]


@dataclass(frozen=True, slots=True)
class Policy:
    prefill: Cost
    decode: Cost
    colocated: Cost  # of a worker that does both


class Loaded(Protocol):
    def load(self, hashes: Sequence[bytes]) -> Load: ...


W = TypeVar("W", bound=Loaded)

# A reservation that does not fit waits for whole requests to end: dearer than any batch.
_SHORTAGE_COST = 10.0
# Prompt tokens in a queue that weigh as much as a full batch.
_FULL_QUEUE = 1024
# Tokens of output that a request is expected to write, whatever its limit says.
EXPECTED_OUTPUT = 256


def tokens_to_first_token(load: Load, demand: Demand) -> float:
    """Prompt tokens that are computed before this request's first token: the queue and its own
    uncached part. A hot prefix thus attracts until its worker's queue outweighs it."""
    return load.queued_tokens + demand.num_tokens - load.cached_tokens


def decode_pressure(load: Load, demand: Demand) -> float:
    """Batch fullness plus block fullness after this request, and a high price for a shortage."""
    expected = demand.num_tokens + min(demand.max_new_tokens, EXPECTED_OUTPUT)
    needed = -(-(expected - load.cached_tokens) // demand.block_size)
    total = max(load.total_blocks, 1)
    used = (load.total_blocks - load.free_blocks + needed) / total
    shortage = max(0, needed - load.free_blocks) / total
    batch = (load.num_requests + 1) / max(load.max_num_seqs, 1)
    return batch + used + _SHORTAGE_COST * shortage


def both_phases(load: Load, demand: Demand) -> float:
    """For a worker that prefills for itself: its queue delays the first token, its batch all."""
    return decode_pressure(load, demand) + tokens_to_first_token(load, demand) / _FULL_QUEUE


def requests(load: Load, demand: Demand) -> float:
    return load.num_requests


def queue(load: Load, demand: Demand) -> float:
    return load.queued_tokens + load.num_requests


def turn(load: Load, demand: Demand) -> float:
    return load.last_chosen


POLICIES = {
    "kv_aware": Policy(tokens_to_first_token, decode_pressure, both_phases),
    "least_loaded": Policy(queue, requests, requests),
    "round_robin": Policy(turn, turn, turn),
}


def cheapest(
    workers: Sequence[W], cost: Cost, demand: Demand, hashes: Sequence[bytes]
) -> tuple[float, W]:
    """The worker with the lowest cost, and the cost. `workers` is not empty."""

    def key(worker: W) -> tuple[float, int]:
        load = worker.load(hashes)
        return cost(load, demand), load.last_chosen

    best = min(workers, key=key)
    return key(best)[0], best
