"""Where a request goes: plain functions from what is known of workers to a cost; the lowest is
chosen.

`kv_aware` costs are estimates in seconds, from what the workers measure of themselves. The others
count or draw lots. Among equal costs the worker that was chosen longest ago wins, so that equals
take turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from typing import Generic, NamedTuple, TypeVar


class Speeds(NamedTuple):
    """What a worker measures of itself; the defaults are for a pool that has measured nothing."""

    prefill: float = 2000.0  # tokens/s
    decode_step_s: float = 0.02  # a step that decodes n sequences takes this
    decode_sequence_s: float = 0.0002  # and n times this


class Load(NamedTuple):
    """What a policy may know about one worker, this router's own unreported requests included.
    Speeds that the worker has not measured yet are its pool mates', or a guess.

    A tuple, which is made fast: a placement makes one for each worker."""

    queued_tokens: int  # prompt tokens that are not computed yet
    num_requests: int  # running and waiting
    free_blocks: int  # free, or cached and nobody's
    total_blocks: int
    max_num_seqs: int
    cached_tokens: int  # of this request, in its prefix cache
    last_chosen: int  # tick of the last request that was placed there
    speeds: Speeds = Speeds()
    step_tokens: int = 2048  # that one step computes at most
    token_bytes: float = 0.0  # of KV
    identity: bytes = b""  # of the worker id, the same in every router: for drawing lots


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs."""

    num_tokens: int  # prompt, and output of earlier attempts
    max_new_tokens: int
    block_size: int
    session: str = ""  # requests of one session belong together; "": of none


W = TypeVar("W")
Cost = Callable[[Load, Demand], float]
PairCost = Callable[[Load, Load, Demand, float], float]  # P, D, demand, bytes/s


@dataclass(frozen=True, slots=True)
class Policy:
    prefill: Cost
    decode: Cost
    colocated: Cost  # of a worker that does both
    hand_over: PairCost  # what the pair adds to the costs of its two
    is_in_seconds: bool = False


# Tokens of output that a request is expected to write, whatever its limit says.
EXPECTED_OUTPUT = 256
# A hand-over's fixed part: its calls and the decode worker's step that it waits for.
HAND_OVER_S = 0.005
# What a worker is sent ahead, so that it stays busy; everybody else waits in the router.
AHEAD_S = 0.5  # of prompts
AHEAD_TOKENS = 512  # and never less: a step is most efficient when it is full
AHEAD_SEATS = 0.25  # of its batch
# What is computed twice takes from those who come after: so much of the time it takes is added.
_REUSE = 0.1


def prefill_cost(load: Load, demand: Demand) -> float:
    """The time to the first token, and a little for the work that it is. A hot prefix attracts
    until its worker's queue takes longer than what it saves."""
    return prefill_seconds(load, demand) + _REUSE * own_prefill_seconds(load, demand)


def prefill_seconds(load: Load, demand: Demand) -> float:
    """Until the first token: the prompts before this one, and what of this one is not cached."""
    return (load.queued_tokens + uncached(load, demand)) / load.speeds.prefill


def own_prefill_seconds(load: Load, demand: Demand) -> float:
    """Of this prompt alone."""
    return uncached(load, demand) / load.speeds.prefill


def uncached(load: Load, demand: Demand) -> int:
    """Prompt tokens that this worker would have to compute."""
    return max(1, demand.num_tokens - load.cached_tokens)


def decode_seconds(load: Load, demand: Demand) -> float:
    """The wait for blocks and a seat in the batch, then each token at the batch's pace."""
    num_new = min(demand.max_new_tokens, EXPECTED_OUTPUT)
    return room_seconds(load, demand) + num_new * token_seconds(load, 1)


def token_seconds(load: Load, num_more: int = 0) -> float:
    """From one token to the next, with so many more sequences in the batch."""
    num_seqs = min(load.num_requests + num_more, max(load.max_num_seqs, 1))
    return load.speeds.decode_step_s + num_seqs * load.speeds.decode_sequence_s


def room_seconds(load: Load, demand: Demand) -> float:
    """Until blocks and a seat are free. Requests end one after the other: all that run now are
    taken to be over after `EXPECTED_OUTPUT` steps."""
    blocks = blocks_needed(load, demand) - load.free_blocks
    seats = load.num_requests + 1 - load.max_num_seqs
    if blocks <= 0 and seats <= 0:
        return 0.0
    used = max(load.total_blocks - load.free_blocks, 1)
    share = max(blocks / used, seats / max(load.num_requests, 1))
    return share * EXPECTED_OUTPUT * token_seconds(load)


def blocks_needed(load: Load, demand: Demand) -> int:
    """For the prompt that is not cached and the expected output."""
    expected = demand.num_tokens + min(demand.max_new_tokens, EXPECTED_OUTPUT)
    return -(-(expected - load.cached_tokens) // demand.block_size)


def colocated_cost(load: Load, demand: Demand) -> float:
    """Of a worker that prefills for itself."""
    return prefill_cost(load, demand) + decode_seconds(load, demand)


def local_cost(load: Load, demand: Demand) -> float:
    """Of a decode worker that prefills for once: also what the prompt takes from all who decode
    beside it, together, since they were promised that no prompt would."""
    stall_s = own_prefill_seconds(load, demand) * load.num_requests
    return colocated_cost(load, demand) + stall_s


def hand_over_seconds(prefill: Load, decode: Load, demand: Demand, bandwidth: float) -> float:
    """What is left to move when the prompt is computed. Blocks travel while the next chunk is
    computed, so that this is at least the last chunk, and more when the wire is slower than the
    prefill. The wait for room at D, too, begins with the first chunk.

        P  | queue | chunk | chunk | chunk |
        D  |       | room? | pull ......... | tail |
    """
    own_s = own_prefill_seconds(prefill, demand)
    missing = max(0, demand.num_tokens - decode.cached_tokens)
    pull_s = missing * prefill.token_bytes / bandwidth
    last = min(missing, uncached(prefill, demand), prefill.step_tokens)
    tail_s = max(pull_s - own_s, last * prefill.token_bytes / bandwidth)
    hidden_s = min(room_seconds(decode, demand), own_s)
    return HAND_OVER_S + tail_s - hidden_s


def has_room(load: Load, prefills: bool, decodes: bool) -> bool:
    """Whether another request would begin soon on a worker that does these phases. An idle worker
    takes anything."""
    if not load.num_requests:
        return True
    if prefills and load.queued_tokens > max(AHEAD_S * load.speeds.prefill, AHEAD_TOKENS):
        return False
    if not decodes:
        return True
    seats = load.max_num_seqs + max(1, int(AHEAD_SEATS * load.max_num_seqs))
    return load.num_requests < seats and load.free_blocks > 0


def requests(load: Load, demand: Demand) -> float:
    return load.num_requests


def queue(load: Load, demand: Demand) -> float:
    return load.queued_tokens + load.num_requests


def turn(load: Load, demand: Demand) -> float:
    return load.last_chosen


def lot(load: Load, demand: Demand) -> float:
    """Rendezvous hashing: a session draws a number for each worker, and keeps its worker when
    others come and go."""
    drawn = blake2b(demand.session.encode(), key=load.identity, digest_size=8)
    return int.from_bytes(drawn.digest(), "little") / (1 << 64)


def nothing(prefill: Load, decode: Load, demand: Demand, bandwidth: float) -> float:
    return 0.0


POLICIES = {
    "kv_aware": Policy(prefill_cost, decode_seconds, colocated_cost, hand_over_seconds, True),
    "least_loaded": Policy(queue, requests, requests, nothing),
    "round_robin": Policy(turn, turn, turn, nothing),
    "session": Policy(lot, lot, lot, nothing),
}


class Candidate(NamedTuple, Generic[W]):
    """A worker and what it would cost. The better one sorts first."""

    cost: float
    worker: W
    load: Load

    @property
    def key(self) -> tuple[float, int]:
        return self.cost, self.load.last_chosen


class Pair(NamedTuple, Generic[W]):
    cost: float
    prefill: Candidate[W]
    decode: Candidate[W]

    @property
    def key(self) -> tuple[float, int]:
        return self.cost, self.prefill.load.last_chosen + self.decode.load.last_chosen


# Of each side, the best by their own costs: only their pairs are compared, so that the time of a
# placement grows with the number of workers, not of pairs.
SHORTLIST = 4


def best_worker(loads: Sequence[tuple[W, Load]], cost: Cost, demand: Demand) -> Candidate[W]:
    """`loads` is not empty."""
    return shortlist(loads, cost, demand, 1)[0]


def shortlist(
    loads: Sequence[tuple[W, Load]], cost: Cost, demand: Demand, most: int = SHORTLIST
) -> list[Candidate[W]]:
    """The best first."""
    candidates = [Candidate(cost(load, demand), worker, load) for worker, load in loads]
    return nsmallest(most, candidates, key=lambda candidate: candidate.key)


def best_pair(
    prefills: Sequence[tuple[W, Load]],
    decodes: Sequence[tuple[W, Load]],
    policy: Policy,
    demand: Demand,
    bandwidth: Callable[[W, W], float],
    most: int = SHORTLIST,
) -> Pair[W]:
    """Of the `most` best on each side. Neither side is empty. `bandwidth` from one worker to
    another, in bytes/s."""
    takers = shortlist(decodes, policy.decode, demand, most)
    pairs = []
    for p in shortlist(prefills, policy.prefill, demand, most):
        for d in takers:
            link = bandwidth(p.worker, d.worker)
            cost = p.cost + d.cost + policy.hand_over(p.load, d.load, demand, link)
            pairs.append(Pair(cost, p, d))
    return min(pairs, key=lambda pair: pair.key)
