"""Costs, prefix beliefs and the breaker: plain functions and clocks."""

from dataclasses import dataclass, replace

import pytest

from core.block_hash import block_hashes
from router.breaker import Breaker
from router.policy import POLICIES, Demand, Load, cheapest
from router.prefix_index import PrefixIndex

IDLE = Load(
    queued_tokens=0,
    num_requests=0,
    free_blocks=100,
    total_blocks=100,
    max_num_seqs=64,
    cached_tokens=0,
    last_chosen=0,
)
DEMAND = Demand(num_tokens=160, max_new_tokens=64, block_size=16)


@dataclass
class Fake:
    state: Load

    def load(self, hashes) -> Load:
        return self.state


def choose(side: str, *loads: Load, policy: str = "kv_aware") -> int:
    workers = [Fake(load) for load in loads]
    best = cheapest(workers, getattr(POLICIES[policy], side), DEMAND, ())[1]
    return [worker is best for worker in workers].index(True)


def test_prefill_prefers_the_prefix_until_its_queue_is_longer_than_what_it_saves():
    hot = replace(IDLE, cached_tokens=128)
    assert choose("prefill", IDLE, replace(hot, queued_tokens=127)) == 1
    assert choose("prefill", IDLE, replace(hot, queued_tokens=129)) == 0


def test_decode_prefers_free_blocks_and_small_batches():
    assert choose("decode", replace(IDLE, num_requests=32), IDLE) == 1
    assert choose("decode", replace(IDLE, free_blocks=50), IDLE) == 1
    # What does not fit costs more than any batch.
    assert choose("decode", replace(IDLE, free_blocks=5), replace(IDLE, num_requests=40)) == 1


def test_colocated_weighs_both():
    assert choose("colocated", IDLE, replace(IDLE, cached_tokens=128)) == 1
    assert choose("colocated", replace(IDLE, queued_tokens=5000), IDLE) == 1


def test_equals_take_turns():
    assert choose("prefill", replace(IDLE, last_chosen=2), replace(IDLE, last_chosen=1)) == 1


@pytest.mark.parametrize("side", ["prefill", "decode", "colocated"])
def test_other_policies(side):
    busy = replace(IDLE, num_requests=3, last_chosen=1)
    rested = replace(IDLE, last_chosen=2)
    assert choose(side, busy, rested, policy="least_loaded") == 1
    assert choose(side, busy, rested, policy="round_robin") == 0


def test_prefix_index_matches_leading_blocks_alone():
    index = PrefixIndex(10)
    hashes = block_hashes(range(64), 16)
    index.add(hashes[1:])
    assert index.match(hashes) == 0
    index.add(hashes)
    assert index.match(hashes) == 4
    assert index.match(block_hashes([*range(32), *range(32)], 16)) == 2
    assert index.match(block_hashes(range(64), 16, "salt")) == 0


def test_prefix_index_is_bounded_and_forgets_tails_first():
    index = PrefixIndex(4)
    first, second = block_hashes(range(64), 16), block_hashes(range(100, 132), 16)
    index.add(first)
    index.add(second)
    assert len(index) == 4
    assert index.match(second) == 2 and index.match(first) == 2
    index.add(block_hashes(range(1000), 16))
    assert len(index) == 4


def test_breaker_opens_half_opens_and_closes():
    now = 0.0
    breaker = Breaker(lambda: now)
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    now = 1.0
    assert breaker.allows()
    breaker.sent()
    assert not breaker.allows(), "one probe at a time"
    breaker.failed()
    now = 2.5
    assert not breaker.allows(), "the pause doubles"
    now = 3.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    breaker.failed()
    assert breaker.allows()


def test_breaker_pause_is_bounded():
    now = 0.0
    breaker = Breaker(lambda: now)
    for _ in range(50):
        breaker.failed()
    now = 30.0
    assert breaker.allows()
