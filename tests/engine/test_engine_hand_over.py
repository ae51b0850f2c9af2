"""A prefill and a decode engine, and a hand-over between them without a wire."""

import random

import pytest

from core.errors import EngineError, RequestError
from core.types import FinishReason, GenerationRequest, KVBlockCounts
from engine.types import SequenceOutput
from support.mock_model import (
    B,
    block_table_of,
    collect,
    generate,
    is_idle,
    make_request,
    mixed_requests,
    only,
    prompt_of,
)


class Pair:
    """A prefill and a decode engine, and a test's hands as the transport."""

    def __init__(self, make_engine, prefill: dict, decode: dict) -> None:
        self.p, self.d = make_engine(**prefill), make_engine(**decode)
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}  # of P
        self.reserved: dict[str, SequenceOutput] = {}  # by D
        self.requests: dict[str, GenerationRequest] = {}
        self.first: dict[str, int] = {}

    def add(self, request: GenerationRequest) -> None:
        self.requests[request.request_id] = request
        self.p.add_prefill(request)

    def step_p(self) -> None:
        for output in self.p.step():
            if output.admitted:
                self.tables[output.request_id] = output.block_table
                self.d.add_remote(self.requests[output.request_id])
            collect(self.tokens, [output])
            if output.token_ids:
                if output.finish_reason is None:
                    self.first[output.request_id] = output.token_ids[0]
                else:
                    self.d.abort(output.request_id)
        self.p.check_integrity()

    def step_d(self) -> None:
        for output in self.d.step():
            if output.admitted:
                self.reserved[output.request_id] = output
            collect(self.tokens, [output])
        self.d.check_integrity()

    def transfer(self, request_id: str) -> None:
        """Copies what D does not hold already, then lets P go and D decode."""
        assert request_id in self.p.scheduler.held
        reserved = self.reserved.pop(request_id)
        known = reserved.num_cached_tokens // B
        source, target = self.tables[request_id][known:], reserved.block_table[known:]
        assert block_table_of(self.p, request_id)[known:] == source
        assert block_table_of(self.d, request_id)[known:] == target
        self.d.kv_cache[target] = self.p.kv_cache[source]
        self.p.release(request_id)
        self.d.start_decode(request_id, self.first.pop(request_id))

    @property
    def ready(self) -> list[str]:
        return [request_id for request_id in self.first if request_id in self.reserved]

    def run(self, rng: random.Random, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not (self.p.has_work() or self.d.has_work() or self.first):
                return
            rng.choice([self.step_p, self.step_d])()
            for request_id in self.ready:
                if rng.random() < 0.5:
                    self.transfer(request_id)
        raise AssertionError("the pair is stuck")


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B, 30])
def test_a_pair_gives_the_answer_of_one_engine(make_engine, length):
    request = make_request("r", prompt_of(length), temperature=1.0, seed=3, repetition_penalty=1.3)
    expected = generate(make_engine(), request)["r"]
    pair = Pair(make_engine, {"max_num_batched_tokens": 8}, {})
    pair.d.add(make_request("other", prompt_of(5, seed=9), max_tokens=3))  # other block ids
    pair.d.step()
    pair.add(request)
    pair.run(random.Random(0))
    assert pair.tokens["r"] == expected
    assert pair.d.stats().tokens_prefilled_total == 5  # all of "other"
    assert pair.d.stats().tokens_decoded_total == 7 + 2
    assert is_idle(pair.p)
    assert is_idle(pair.d)


def test_states_and_outputs_of_both_sides(make_engine):
    pair = Pair(make_engine, {"max_num_batched_tokens": 4}, {})
    request = make_request("r", prompt_of(10), max_tokens=3, logprobs=1)
    pair.p.add_prefill(request)
    steps = [only(pair.p.step()) for _ in range(3)]
    assert [o.num_computed_tokens for o in steps] == [4, 8, 10]
    assert [o.admitted for o in steps] == [True, False, False]
    assert steps[0].block_table == [0, 1, 2]
    assert [len(o.token_ids) for o in steps] == [0, 0, 1]
    assert len(steps[2].logprobs) == 1  # V18
    assert "r" in pair.p.scheduler.held
    assert not pair.p.has_work()
    assert pair.p.block_counts() == KVBlockCounts(total=64, free=61, held=3)

    pair.d.add_remote(request)
    reserved = only(pair.d.step())
    assert (reserved.admitted, reserved.block_table) == (True, [0, 1, 2])
    assert not pair.d.has_work()
    assert pair.d.block_counts() == KVBlockCounts(total=64, free=61, awaiting=3)
    assert pair.d.stats().requests_running == 1
    pair.d.kv_cache[reserved.block_table] = pair.p.kv_cache[block_table_of(pair.p, "r")]
    pair.p.release("r")
    pair.p.release("r")
    assert "r" not in pair.p.scheduler.held
    assert pair.p.block_counts() == KVBlockCounts(total=64, free=62, cached=2)
    pair.d.start_decode("r", steps[2].token_ids[0])
    assert pair.d.block_counts() == KVBlockCounts(total=64, free=61, running=3)
    second = only(pair.d.step())
    assert len(second.logprobs) == len(second.token_ids) == 1
    assert second.num_computed_tokens == 11
    assert only(pair.d.step()).finish_reason is FinishReason.LENGTH


def test_kv_that_arrived_is_in_the_prefix_cache(make_engine):
    pair = Pair(make_engine, {}, {})
    prompt = prompt_of(3 * B)
    hits = []
    for _ in range(2):
        pair.add(make_request("r", prompt))
        pair.step_p()
        pair.step_d()
        hits.append(pair.reserved["r"].num_cached_tokens)
        pair.transfer("r")
        pair.run(random.Random(0))
    assert hits == [0, 3 * B]
    half = len(pair.tokens["r"]) // 2
    assert pair.tokens["r"][:half] == pair.tokens["r"][half:]


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"logit_bias": {9: 100.0}}])
def test_a_first_token_that_is_the_last_leaves_nothing_to_hand_over(make_engine, sampling):
    """V17."""
    engine = make_engine()
    engine.add_prefill(make_request("r", prompt_of(9), stop_token_ids=(9,), **sampling))
    output = only(engine.step())
    assert output.finish_reason is not None
    assert len(output.token_ids) == 1
    assert "r" not in engine.scheduler.held
    assert is_idle(engine)


def test_a_prefill_that_nobody_will_fetch_frees_its_blocks(make_engine):
    engine = make_engine()
    engine.add_prefill(make_request("r", prompt_of(9)), hold=False)
    output = only(engine.step())
    assert (len(output.token_ids), output.finish_reason) == (1, None)
    assert is_idle(engine)
    assert engine.block_counts().cached == 2


def test_a_first_token_that_ends_the_sequence_on_d_is_not_followed(make_engine):
    engine = make_engine()
    engine.add_remote(make_request("r", prompt_of(9), max_tokens=1))
    engine.step()
    engine.start_decode("r", 5)
    assert engine.has_work()
    output = only(engine.step())
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
    assert is_idle(engine)


@pytest.mark.parametrize("after", [0, 1, 5, 7])
def test_a_handed_over_sequence_that_is_preempted_is_computed_here(make_engine, after):
    """V11: at once, after one and five steps, and at a block's edge."""
    request = make_request("r", prompt_of(9), temperature=1.0, seed=4, max_tokens=12)
    expected = generate(make_engine(), request)["r"]
    pair = Pair(make_engine, {}, {})
    pair.add(request)
    pair.step_p()
    pair.step_d()
    pair.transfer("r")
    for _ in range(after):
        pair.step_d()
    pair.d.scheduler._preempt(pair.d.scheduler.running[-1])
    pair.run(random.Random(0))
    assert pair.tokens["r"] == expected


@pytest.mark.parametrize("seed", range(6))
def test_many_hand_overs_through_small_pools(make_engine, seed):
    """Transfers end in random order, some requests are dropped on D: every answer is the one of
    a single engine, and no side ever waits for the other's blocks."""
    rng = random.Random(seed)
    requests = mixed_requests(60, seed=seed, longest=40)
    expected = generate(make_engine(1000), *requests)
    caching = {"enable_prefix_caching": bool(seed % 2)}
    pair = Pair(
        make_engine,
        {"num_blocks": 24, "max_num_batched_tokens": 16, **caching},
        {"num_blocks": 22, "max_num_seqs": 6, **caching},
    )
    for request in requests:
        pair.add(request)
    dropped = set()
    for _ in range(20_000):
        if not (pair.p.has_work() or pair.d.has_work() or pair.first):
            break
        rng.choice([pair.step_p, pair.step_d])()
        for request_id in pair.ready:
            draw = rng.random()
            if draw < 0.5:
                pair.transfer(request_id)
            elif draw < 0.55:
                pair.p.abort(request_id)
                pair.d.abort(request_id)
                pair.first.pop(request_id)
                dropped.add(request_id)
    assert is_idle(pair.p)
    assert is_idle(pair.d)
    assert pair.d.stats().preemptions_total > 0
    for request in requests:
        answer = expected[request.request_id]
        got = pair.tokens[request.request_id]
        assert got == (answer[:1] if request.request_id in dropped else answer)


def test_calls_in_the_wrong_state_are_refused_by_name(make_engine):
    engine = make_engine()
    engine.add(make_request("r", prompt_of(5)))
    with pytest.raises(EngineError, match="r is waiting, not awaiting"):
        engine.start_decode("r", 1)
    with pytest.raises(EngineError, match="r is waiting, not held"):
        engine.release("r")
    with pytest.raises(EngineError, match="gone is not known"):
        engine.start_decode("gone", 1)
    engine.abort("r")
    engine.add_remote(make_request("r", prompt_of(5)))
    engine.step()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.start_decode("r", 101)
    engine.abort("r")
