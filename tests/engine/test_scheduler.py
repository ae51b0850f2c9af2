"""Exact block ids and queue orders, without a model: a step appends the next free number."""

import itertools

import pytest

from core.block_hash import block_hashes
from core.config import EngineConfig
from core.types import KVBlockCounts
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence, SequenceState
from support.mock_model import make_request

WAITING, RUNNING = SequenceState.WAITING, SequenceState.RUNNING
AWAITING, HELD = SequenceState.AWAITING, SequenceState.HELD


class Bench:
    """A scheduler over blocks of 4 tokens, and the little that an engine does around it."""

    def __init__(self, num_blocks: int, **config: int | bool) -> None:
        self.pool = BlockPool(num_blocks, bool(config.get("enable_prefix_caching", True)))
        self.scheduler = Scheduler(EngineConfig(block_size=4, **config), self.pool)
        self.arrivals = itertools.count()
        self.samples = itertools.count(1000)

    def add(self, name: str, tokens: list[int], **kinds: bool) -> Sequence:
        request = make_request(name, tokens, max_tokens=100)
        seq = Sequence(request, arrival=next(self.arrivals), added_at=0.0, **kinds)
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for seq, num_tokens in plan.steps:
            self.scheduler.advance(seq, num_tokens)
            if seq.num_uncomputed_tokens == 0:
                seq.token_ids.append(next(self.samples))
                if seq.prefill_only:
                    self.scheduler.hold(seq)
        self.scheduler.check()
        return plan

    def steps(self) -> list[tuple[str, int]]:
        return names(self.step())


def names(plan: StepPlan) -> list[tuple[str, int]]:
    return [(seq.request_id, num_tokens) for seq, num_tokens in plan.steps]


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_decodes_come_first_then_prompts_in_chunks_in_order_of_arrival():
    bench = Bench(64, max_num_batched_tokens=8)
    bench.add("a", tokens(0, 5))
    bench.add("b", tokens(100, 12))
    bench.add("c", tokens(200, 3))
    assert bench.steps() == [("a", 5), ("b", 3)]
    plan = bench.step()
    assert names(plan) == [("a", 1), ("b", 7)]
    assert plan.num_decodes == 1
    plan = bench.step()
    assert names(plan) == [("a", 1), ("b", 2), ("c", 3)]
    plan = bench.step()
    assert names(plan) == [("a", 1), ("b", 1), ("c", 1)]
    assert plan.num_decodes == 3


def test_a_prefill_gets_all_blocks_of_its_prompt_at_once():
    bench = Bench(8, max_num_batched_tokens=4)
    a = bench.add("a", tokens(0, 9))
    b = bench.add("b", tokens(100, 5))
    assert bench.steps() == [("a", 4)]
    assert a.block_table == [0, 1, 2]
    bench.step()
    assert bench.steps() == [("a", 1), ("b", 3)]
    assert b.block_table == [3, 4]


def test_decoding_grows_a_block_at_a_time():
    bench = Bench(8)
    a = bench.add("a", tokens(0, 3))
    tables = []
    for _ in range(7):
        bench.step()
        tables.append(list(a.block_table))
    assert tables == [[0], [0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1, 2]]


def test_max_num_seqs_bounds_running_and_awaiting_together():
    bench = Bench(64, max_num_seqs=2)
    bench.add("a", tokens(0, 2))
    remote = bench.add("b", tokens(100, 2), wants_remote_kv=True)
    bench.add("c", tokens(200, 2))
    assert bench.steps() == [("a", 2)]
    assert remote.state is AWAITING
    assert bench.steps() == [("a", 1)]
    bench.scheduler.finish(remote)
    assert bench.steps() == [("a", 1), ("c", 2)]


def test_admission_leaves_a_free_block_for_each_sequence_that_may_grow():
    bench = Bench(4)
    bench.add("a", tokens(0, 4))
    bench.add("b", tokens(100, 4))
    bench.add("c", tokens(200, 4))
    assert bench.steps() == [("a", 4), ("b", 4)]  # c would leave 1 block for 2
    assert bench.pool.counts() == KVBlockCounts(total=4, free=2, running=2)
    assert bench.steps() == [("a", 1), ("b", 1)]
    assert bench.pool.num_free == 0


def test_an_empty_engine_admits_what_fills_it():
    bench = Bench(4)
    remote = bench.add("a", tokens(0, 16), wants_remote_kv=True)
    bench.step()
    assert remote.block_table == [0, 1, 2, 3]


def test_the_newest_is_preempted_and_waits_at_the_front():
    bench = Bench(5, enable_prefix_caching=False)
    a = bench.add("a", tokens(0, 7))
    b = bench.add("b", tokens(100, 8))
    assert bench.steps() == [("a", 7), ("b", 8)]
    assert bench.steps() == [("a", 1), ("b", 1)]
    assert (a.block_table, b.block_table) == ([0, 1], [2, 3, 4])
    later = bench.add("later", tokens(300, 3))
    plan = bench.step()  # a needs a third block
    assert names(plan) == [("a", 1)]
    assert plan.has_preempted
    assert a.block_table == [0, 1, 2]  # b's blocks were freed in reverse
    assert b.state is WAITING
    assert (b.block_table, b.num_computed_tokens) == ([], 0)
    assert list(bench.scheduler.waiting) == [b, later]
    assert bench.scheduler.num_preemptions == 1
    assert bench.steps() == [("a", 1)]  # b wants 3 blocks and has to leave one
    bench.scheduler.finish(a)
    assert bench.steps() == [("b", 10), ("later", 3)]


def test_a_sequence_that_asks_may_have_to_go_itself():
    bench = Bench(3)
    bench.add("held", tokens(0, 4), prefill_only=True, hold=True)
    a = bench.add("a", tokens(100, 7))
    assert bench.steps() == [("held", 4), ("a", 7)]
    assert bench.steps() == [("a", 1)]
    plan = bench.step()
    assert names(plan) == []
    assert plan.has_preempted
    assert plan.made_progress
    assert a.state is WAITING
    assert bench.pool.counts() == KVBlockCounts(total=3, cached=2, held=1)
    assert not bench.step().made_progress  # 3 blocks wanted, until the held one goes
    bench.scheduler.finish(bench.scheduler.held["held"])
    assert bench.steps() == [("a", 1)]  # its own full blocks are hits


def test_a_prefill_for_a_peer_is_never_preempted():
    bench = Bench(5, max_num_batched_tokens=4)
    a = bench.add("a", tokens(0, 12))
    for _ in range(3):
        bench.step()
    p = bench.add("p", tokens(100, 4), prefill_only=True, hold=True)
    assert bench.steps() == [("a", 1)]  # a has 4 blocks of 5, p may not take the last
    bench.scheduler.finish(a)
    a = bench.add("b", tokens(50, 15))
    assert bench.steps() == [("p", 4)]
    assert p.state is HELD
    for _ in range(5):
        bench.step()
    assert (len(a.token_ids), a.state) == (17, RUNNING)
    plan = bench.step()
    assert (plan.has_preempted, names(plan)) == (True, [])
    assert (a.state, p.state) == (WAITING, HELD)


def test_a_running_prefill_for_a_peer_is_passed_over_for_an_older_victim():
    bench = Bench(5, max_num_batched_tokens=2, enable_prefix_caching=False)
    a = bench.add("a", tokens(0, 2))
    bench.step()
    p = bench.add("p", tokens(100, 12), prefill_only=True, hold=True)
    assert bench.steps() == [("a", 1), ("p", 1)]
    assert (a.block_table, p.block_table) == ([0], [1, 2, 3])
    bench.step()
    for _ in range(4):
        bench.step()
    assert a.block_table == [0, 4]
    assert p.num_computed_tokens == 6
    plan = bench.step()
    assert (a.state, p.state) == (WAITING, RUNNING)
    assert names(plan) == [("p", 2)]
    assert p.block_table == [1, 2, 3]


def test_a_prefix_hit_shares_full_blocks_and_computes_the_rest():
    bench = Bench(16)
    a = bench.add("a", tokens(0, 10))
    bench.step()
    b = bench.add("b", [*tokens(0, 9), 500, 501])
    assert bench.steps() == [("a", 1), ("b", 3)]
    assert a.block_table == [0, 1, 2]
    assert b.block_table == [0, 1, 3]
    assert b.num_cached_tokens == 8
    assert bench.scheduler.num_hit_tokens == 8


@pytest.mark.parametrize(("length", "num_cached"), [(7, 4), (8, 4), (9, 8), (12, 8)])
def test_a_fully_cached_prompt_computes_its_last_block_again(length, num_cached):
    bench = Bench(16)
    a = bench.add("a", tokens(0, 12))
    bench.step()
    bench.scheduler.finish(a)
    b = bench.add("b", tokens(0, length))
    assert bench.steps() == [("b", length - num_cached)]
    assert b.num_cached_tokens == num_cached


def test_blocks_are_found_as_soon_as_their_chunk_is_computed():
    bench = Bench(16, max_num_batched_tokens=6)
    bench.add("a", tokens(0, 12))
    bench.step()
    b = bench.add("b", [*tokens(0, 4), 7])
    bench.step()
    assert bench.steps() == [("a", 1), ("b", 1)]
    assert b.block_table[0] == 0


def test_the_last_sampled_token_is_in_no_cached_block():
    bench = Bench(16)
    a = bench.add("a", tokens(0, 3))
    bench.step()
    assert len(a.token_ids) == 4
    assert a.num_registered_blocks == 0
    bench.step()
    assert a.num_registered_blocks == 1


def test_a_failed_admission_changes_nothing():
    bench = Bench(6)
    a = bench.add("a", tokens(0, 8))
    bench.step()
    bench.scheduler.finish(a)
    before = list(bench.pool._cached)
    hog = bench.add("hog", tokens(900, 16), prefill_only=True, hold=True)
    bench.step()
    assert hog.state is HELD
    late = bench.add("late", [*tokens(0, 8), *tokens(50, 5)])
    for _ in range(3):
        assert not bench.step().made_progress
        assert list(bench.pool._cached) == before
        assert late.num_computed_tokens == late.num_cached_tokens == 0
    bench.scheduler.finish(hog)
    assert bench.steps() == [("late", 5)]


def test_a_remote_sequence_may_hit_all_of_its_blocks():
    bench = Bench(8)
    a = bench.add("a", tokens(0, 8))
    bench.step()
    bench.scheduler.finish(a)
    b = bench.add("b", tokens(0, 8), wants_remote_kv=True)
    bench.step()
    assert (b.block_table, b.num_cached_tokens) == ([0, 1], 8)
    bench.scheduler.start_decode(b)
    b.token_ids.append(7)
    assert bench.steps() == [("b", 1)]
    assert b.block_table == [0, 1, 2]


def test_remote_blocks_can_be_found_only_after_their_kv_has_arrived():
    bench = Bench(16)
    a = bench.add("a", tokens(0, 8), wants_remote_kv=True)
    bench.step()
    hashes = block_hashes(tokens(0, 8), 4)
    assert bench.pool.find(hashes) == []
    bench.scheduler.start_decode(a)
    assert bench.pool.find(hashes) == a.block_table == [0, 1]
    a.token_ids.append(1)
    c = bench.add("c", tokens(0, 9))
    assert bench.steps() == [("a", 1), ("c", 1)]
    assert c.num_cached_tokens == 8


def test_remote_sequences_wait_while_a_preempted_one_does():
    bench = Bench(4)
    bench.add("held", tokens(0, 4), prefill_only=True, hold=True)
    a = bench.add("a", tokens(100, 11))
    bench.step()
    remote = bench.add("r", tokens(200, 4), wants_remote_kv=True)
    bench.step()
    bench.step()  # a needs a block that nobody has
    assert a.state is WAITING
    bench.step()
    assert remote.state is WAITING
    assert bench.pool.num_free == 3
    bench.scheduler.finish(bench.scheduler.held["held"])
    assert bench.steps() == [("a", 1)]
    assert a.state is RUNNING
    assert remote.state is WAITING


def test_remote_sequences_wait_even_if_a_preempted_one_lacks_only_token_budget():
    bench = Bench(32, max_num_batched_tokens=4)
    b = bench.add("b", tokens(0, 1))
    bench.add("p", tokens(100, 8))
    assert bench.steps() == [("b", 1), ("p", 3)]
    bench.scheduler._preempt(b)
    remote = bench.add("r", tokens(300, 4), wants_remote_kv=True)
    assert bench.steps() == [("p", 4)]
    assert (b.state, remote.state) == (WAITING, WAITING)
    assert bench.steps() == [("p", 1), ("b", 2)]
    assert remote.state is AWAITING


def test_a_reservation_needs_no_token_budget():
    bench = Bench(16, max_num_batched_tokens=4)
    bench.add("a", tokens(0, 8))
    bench.add("b", tokens(50, 4))
    remote = bench.add("r", tokens(200, 4), wants_remote_kv=True)
    assert bench.steps() == [("a", 4)]
    assert remote.state is AWAITING


def test_admission_is_in_order_of_arrival_over_both_queues():
    bench = Bench(6)
    hog = bench.add("hog", tokens(0, 12), prefill_only=True, hold=True)
    big = bench.add("big", tokens(100, 16), wants_remote_kv=True)
    small = bench.add("small", tokens(200, 2))
    assert bench.steps() == [("hog", 12)]
    assert not bench.step().made_progress
    assert (big.state, small.state) == (WAITING, WAITING)
    bench.scheduler.finish(hog)
    assert bench.steps() == [("small", 2)]
    assert big.state is AWAITING


def test_a_head_that_does_not_fit_does_not_stop_sequences_whose_kv_has_arrived():
    """V10: 7 blocks; a needs one more block to start; all transfers land."""
    bench = Bench(7)
    a = bench.add("a", tokens(0, 12), wants_remote_kv=True)
    b = bench.add("b", tokens(100, 12), wants_remote_kv=True)
    bench.add("head", tokens(200, 20))
    bench.step()
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3, 4, 5])
    assert not bench.step().made_progress
    for seq in (a, b):
        bench.scheduler.start_decode(seq)
        seq.token_ids.append(1)
    plan = bench.step()
    assert names(plan) == [("a", 1)]  # b, the newest, made room
    assert a.block_table == [0, 1, 2, 6]
    assert b.state is WAITING
    bench.scheduler.finish(a)
    assert bench.steps()[0][0] == "b"


def test_gauge_of_tokens_to_prefill():
    bench = Bench(64, max_num_batched_tokens=8)
    bench.add("a", tokens(0, 12))
    bench.add("b", tokens(50, 5))
    bench.add("r", tokens(200, 4), wants_remote_kv=True)
    assert bench.scheduler.num_waiting_prefill_tokens == 17
    bench.step()
    assert bench.scheduler.num_waiting_prefill_tokens == 9
    bench.step()
    bench.step()
    assert bench.scheduler.num_waiting_prefill_tokens == 0
