"""Estimates in seconds and exact choices, the index of KV blocks, and the breaker."""

from dataclasses import replace

import pytest

from core.block_hash import block_hashes, short_hash
from core.errors import UnavailableError
from router.placement.breaker import Breaker
from router.placement.policy import (
    POLICIES,
    Demand,
    Load,
    Speeds,
    best_pair,
    best_worker,
    colocated_cost,
    decode_seconds,
    hand_over_seconds,
    local_cost,
    prefill_seconds,
)
from router.placement.prefix_index import PrefixIndex
from rpc.worker_pb2 import KvBlockEvents

# 1000 prompt tokens a second; a step takes 20 ms and 1 ms for each sequence.
IDLE = Load(
    queued_tokens=0,
    num_requests=0,
    free_blocks=100,
    total_blocks=100,
    max_num_seqs=64,
    cached_tokens=0,
    last_chosen=0,
    speeds=Speeds(1000.0, 0.020, 0.001),
    step_tokens=64,
    token_bytes=1000.0,
)
DEMAND = Demand(num_tokens=160, max_new_tokens=64, block_size=16)


def choose(side: str, *loads: Load, policy: str = "kv_aware", demand: Demand = DEMAND) -> int:
    return best_worker(list(enumerate(loads)), getattr(POLICIES[policy], side), demand).worker


def test_time_to_first_token_is_queue_and_uncached_prompt_over_the_measured_speed():
    assert prefill_seconds(IDLE, DEMAND) == pytest.approx(0.160)
    warm = IDLE._replace(queued_tokens=500, cached_tokens=128)
    assert prefill_seconds(warm, DEMAND) == pytest.approx(0.532)
    assert prefill_seconds(warm._replace(cached_tokens=160), DEMAND) == pytest.approx(0.501)


def test_prefill_prefers_the_prefix_until_its_queue_is_longer_than_what_it_saves():
    hot = IDLE._replace(cached_tokens=128)
    assert choose("prefill", IDLE, hot._replace(queued_tokens=140)) == 1
    assert choose("prefill", IDLE, hot._replace(queued_tokens=142)) == 0


def test_prefill_prefers_the_faster_worker_until_its_queue_takes_longer():
    fast = IDLE._replace(speeds=Speeds(4000.0, 0.020, 0.001))
    assert choose("prefill", IDLE, fast._replace(queued_tokens=527)) == 1
    assert choose("prefill", IDLE, fast._replace(queued_tokens=529)) == 0


def test_decode_time_is_every_token_at_the_pace_of_the_batch():
    assert decode_seconds(IDLE, DEMAND) == pytest.approx(64 * 0.021)
    busy = IDLE._replace(num_requests=9)
    assert decode_seconds(busy, DEMAND) == pytest.approx(64 * 0.030)
    # A long limit is no plan to write so much.
    assert decode_seconds(IDLE, replace(DEMAND, max_new_tokens=9999)) == pytest.approx(256 * 0.021)


def test_the_wait_for_blocks_and_seats_goes_with_the_share_that_must_end():
    # 14 blocks are needed; 90 are in use, and end over 256 steps of 29 ms.
    full = IDLE._replace(num_requests=9, free_blocks=10)
    wait = 4 / 90 * 256 * 0.029
    assert decode_seconds(full, DEMAND) == pytest.approx(wait + 64 * 0.030)
    # Half of the missing prompt is cached here, so it fits.
    assert decode_seconds(full._replace(cached_tokens=64), DEMAND) == pytest.approx(64 * 0.030)
    # No seat: one of 64 must end; the batch stays as it is.
    crowded = IDLE._replace(num_requests=64)
    wait = 1 / 64 * 256 * 0.084
    assert decode_seconds(crowded, DEMAND) == pytest.approx(wait + 64 * 0.084)


def test_decode_prefers_free_blocks_and_small_batches():
    assert choose("decode", IDLE._replace(num_requests=32), IDLE) == 1
    assert choose("decode", IDLE._replace(free_blocks=5), IDLE) == 1
    # Waiting for two of many blocks is shorter than 64 tokens in a batch of 40.
    assert choose("decode", IDLE._replace(free_blocks=12), IDLE._replace(num_requests=40)) == 0


def test_a_slow_wire_shows_past_the_prefill_and_a_fast_one_for_its_last_chunk():
    # 160 kB: in 1.6 s, of which 0.16 are hidden; or in 1.6 ms, of which 64 tokens are the tail.
    assert hand_over_seconds(IDLE, IDLE, DEMAND, 1e5) == pytest.approx(0.005 + 1.6 - 0.16)
    assert hand_over_seconds(IDLE, IDLE, DEMAND, 1e8) == pytest.approx(0.005 + 0.00064)
    # What D has is not sent; what P has is there at once and sent while it computes the rest.
    warm = IDLE._replace(cached_tokens=96)
    assert hand_over_seconds(IDLE, warm, DEMAND, 1e5) == pytest.approx(0.005 + 0.64)
    assert hand_over_seconds(warm, IDLE, DEMAND, 1e5) == pytest.approx(0.005 + 1.6 - 0.064)


def test_the_wait_for_room_is_hidden_behind_the_prefill():
    full = IDLE._replace(num_requests=9, free_blocks=13)
    wait = 1 / 87 * 256 * 0.029
    assert 0 < wait < 0.160
    expected = 0.005 + 64e-5 - wait
    assert hand_over_seconds(IDLE, full, DEMAND, 1e8) == pytest.approx(expected)


def pair(prefills: list[Load], decodes: list[Load], wires: dict, policy="kv_aware", demand=DEMAND):
    found = best_pair(
        list(enumerate(prefills)),
        list(enumerate(decodes)),
        POLICIES[policy],
        demand,
        lambda p, d: wires.get((p, d), 1e9),
    )
    return found.prefill.worker, found.decode.worker


def test_the_pair_with_the_better_wire_wins_until_its_queue_is_longer():
    slow = {(0, 0): 1e5, (0, 1): 1e5, (1, 0): 1e5}
    assert pair([IDLE, IDLE], [IDLE, IDLE], slow) == (1, 1)
    queued = IDLE._replace(queued_tokens=1400)
    assert pair([IDLE, queued], [IDLE, IDLE], slow) == (1, 1)
    queued = IDLE._replace(queued_tokens=1500)
    assert pair([IDLE, queued], [IDLE, IDLE], slow) == (0, 0)


def test_a_slow_wire_goes_to_the_decode_worker_that_has_the_prefix():
    wires = {(0, 0): 1e5, (0, 1): 1e5}
    assert pair([IDLE], [IDLE, IDLE._replace(cached_tokens=144, num_requests=10)], wires) == (0, 1)
    assert pair([IDLE], [IDLE, IDLE._replace(cached_tokens=144, num_requests=60)], wires) == (0, 0)


def test_colocated_weighs_queue_and_batch_and_a_guest_what_it_takes_from_others():
    own, each = 0.160, 0.021 + 0.009
    busy = IDLE._replace(num_requests=9)
    assert colocated_cost(busy, DEMAND) == pytest.approx(1.1 * own + 64 * each)
    assert local_cost(busy, DEMAND) == pytest.approx(1.1 * own + 64 * each + 9 * own)
    assert choose("colocated", IDLE, IDLE._replace(cached_tokens=128)) == 1
    assert choose("colocated", IDLE._replace(queued_tokens=5000), IDLE) == 1


def test_equals_take_turns():
    older, newer = IDLE._replace(last_chosen=1), IDLE._replace(last_chosen=2)
    assert choose("prefill", newer, older) == 1
    assert pair([newer, older], [older, newer], {}) == (1, 0)


@pytest.mark.parametrize("side", ["prefill", "decode", "colocated"])
def test_other_policies(side):
    busy = IDLE._replace(num_requests=3, last_chosen=1)
    rested = IDLE._replace(last_chosen=2)
    assert choose(side, busy, rested, policy="least_loaded") == 1
    assert choose(side, busy, rested, policy="round_robin") == 0


def test_a_session_keeps_its_worker_when_others_come_and_go():
    workers = {n: IDLE._replace(identity=bytes([n])) for n in range(10)}

    def homes(names: set[int]) -> dict[int, int]:
        loads = [(n, workers[n]) for n in sorted(names)]
        lot = POLICIES["session"].decode
        return {
            s: best_worker(loads, lot, replace(DEMAND, session=str(s))).worker for s in range(500)
        }

    everyone = homes(set(workers))
    counts = [list(everyone.values()).count(n) for n in workers]
    assert min(counts) > 25 and max(counts) < 90
    fewer = homes(set(workers) - {3})
    assert all(fewer[s] == home for s, home in everyone.items() if home != 3)
    assert {fewer[s] for s, home in everyone.items() if home == 3} == set(workers) - {3}


def names(tokens, salt: str = "") -> list[int]:
    return [short_hash(value) for value in block_hashes(tokens, 16, salt)]


def test_the_index_finds_leading_blocks_of_every_worker_in_one_walk():
    index = PrefixIndex()
    a, b, c = (index.open(100) for _ in range(3))
    prompt = names(range(64))
    a.apply(KvBlockEvents(is_snapshot=True, stored=prompt))
    b.apply(KvBlockEvents(is_snapshot=True, stored=prompt[:2]))
    c.apply(KvBlockEvents(is_snapshot=True, stored=prompt[1:]))
    assert index.match(prompt) == {a: 4, b: 2}
    assert [x.match(prompt) for x in (a, b, c)] == [4, 2, 0]
    assert index.match(names([*range(32), *range(32)])) == {a: 2, b: 2}
    assert index.match(names(range(64), "salt")) == {}
    assert index.match([]) == {}
    a.apply(KvBlockEvents(removed=prompt[3:]))
    c.apply(KvBlockEvents(stored=prompt[:1]))
    assert index.match(prompt) == {a: 3, b: 2, c: 4}


def test_a_snapshot_replaces_and_an_end_forgets():
    index = PrefixIndex()
    worker = index.open(100)
    first, second = names(range(64)), names(range(100, 164))
    worker.apply(KvBlockEvents(is_snapshot=True, stored=first))
    worker.apply(KvBlockEvents(is_snapshot=True, stored=second[:2]))
    worker.apply(KvBlockEvents(stored=second[2:]))
    assert index.match(first) == {} and index.match(second) == {worker: 4}
    worker.forget()
    assert len(index) == len(worker) == 0
    worker.apply(KvBlockEvents(stored=second))
    worker.close()
    worker.close()
    worker.apply(KvBlockEvents(stored=second))
    assert len(index) == 0 and index.match(second) == {}


def test_a_place_in_the_index_is_used_again_without_the_old_blocks():
    index = PrefixIndex()
    prompt = names(range(64))
    old, other = index.open(100), index.open(100)
    with old.expecting(prompt):
        old.apply(KvBlockEvents(stored=prompt[:2]))
        old.close()
        new = index.open(100)
        assert index.match(prompt) == {}
        new.apply(KvBlockEvents(stored=prompt[:1]))
    assert index.match(prompt) == {new: 1}
    other.apply(KvBlockEvents(stored=prompt))
    assert index.match(prompt) == {new: 1, other: 4}


def test_blocks_on_their_way_count_until_the_attempt_ends_or_the_worker_says_no():
    index = PrefixIndex()
    worker = index.open(100)
    prompt = names(range(64))
    with worker.expecting(prompt):
        with worker.expecting(prompt):
            assert index.match(prompt) == {worker: 4}
        assert index.match(prompt) == {worker: 4} and len(worker) == 0
        worker.apply(KvBlockEvents(stored=prompt[:3]))
        worker.apply(KvBlockEvents(removed=prompt[2:3]))
        assert index.match(prompt) == {worker: 2}
    assert index.match(prompt) == {worker: 2} and len(index) == 2
    with worker.expecting(prompt):
        pass
    assert index.match(prompt) == {worker: 2} and len(index) == 2


def test_a_worker_cannot_fill_the_index():
    index = PrefixIndex()
    worker = index.open(4)
    with pytest.raises(UnavailableError, match="more KV blocks than it has"):
        worker.apply(KvBlockEvents(is_snapshot=True, stored=names(range(80))))
    assert len(index) == 0
    with worker.expecting(names(range(1600))):
        assert len(index) == 4
    none = index.open(0)  # without a prefix cache
    with none.expecting(names(range(64))):
        assert len(index) == 0


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
