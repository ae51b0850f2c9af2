"""One engine with many requests: preemptions, aborts, dice in any company; and steps that fail."""

import random

import pytest

from core.config import EngineConfig
from engine.engine import Engine
from support.mock_model import (
    B,
    MockModel,
    collect,
    generate,
    is_idle,
    make_request,
    mixed_requests,
    only,
    prompt_of,
    run_to_end,
)


@pytest.fixture(scope="module")
def soak():
    """200 requests and the answers of an engine that has room for all of them at once."""
    requests = mixed_requests(200, seed=1, longest=90)
    config = EngineConfig(block_size=B, enable_prefix_caching=False, max_num_seqs=200)
    engine = Engine(MockModel(), config, num_kv_blocks=6000)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        collect(tokens, engine.step())
    assert engine.stats().preemptions_total == 0
    return requests, tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_200_requests_through_64_blocks(make_engine, soak, prefix_caching, seed):
    """With random arrivals, aborts and preemptions; every answer is the one of a huge pool."""
    requests, expected = soak
    rng = random.Random(seed)
    engine = make_engine(
        64,
        enable_prefix_caching=prefix_caching,
        max_num_seqs=24,
        max_num_batched_tokens=rng.choice([16, 40, 100]),
    )
    queue, alive, aborted, num_forced = list(requests), set(), set(), 0
    rng.shuffle(queue)
    tokens: dict[str, list[int]] = {}
    for _ in range(20_000):
        while queue and rng.random() < 0.5:
            engine.add(queue[-1])
            alive.add(queue.pop().request_id)
        if alive and rng.random() < 0.03:
            victim = rng.choice(sorted(alive))
            engine.abort(victim)
            aborted.add(victim)
            alive.discard(victim)
        if engine.scheduler.running and rng.random() < 0.05:
            engine.scheduler._preempt(engine.scheduler.running[-1])
            num_forced += 1
        has_work = engine.has_work()
        outputs = engine.step()
        engine.check_integrity()
        assert engine.made_progress or not has_work
        collect(tokens, outputs)
        alive -= {o.request_id for o in outputs if o.finish_reason is not None}
        if not queue and not alive:
            break
    assert not alive
    assert is_idle(engine)
    assert engine.stats().preemptions_total > num_forced > 5
    assert 0 < len(aborted) < 100
    for request_id, answer in expected.items():
        got = tokens.get(request_id, [])
        assert got == (answer[: len(got)] if request_id in aborted else answer)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_k": 40, "logprobs": 2}])
def test_seeded_tokens_are_the_same_in_any_company(make_engine, sampling):
    """V29: alone, among random neighbours in any order, and after preemptions."""
    mine = make_request("mine", prompt_of(11), temperature=1.0, seed=42, max_tokens=20, **sampling)
    alone = generate(make_engine(), mine)["mine"]
    preemptions = 0
    for trial in range(10):
        engine = make_engine(32, max_num_batched_tokens=32)
        requests = [mine, *mixed_requests(12, seed=100 + trial, longest=40)]
        random.Random(trial).shuffle(requests)
        assert generate(engine, *requests)["mine"] == alone
        preemptions += engine.stats().preemptions_total
    assert preemptions > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 9])
def test_a_preemption_at_any_step_changes_nothing(make_engine, after, prefix_caching):
    request = make_request(
        "r", prompt_of(2 * B), max_tokens=14, temperature=1.0, seed=5, frequency_penalty=0.3
    )
    expected = generate(make_engine(), request)["r"]
    engine = make_engine(enable_prefix_caching=prefix_caching)
    engine.add(request)
    tokens: dict[str, list[int]] = {}
    for _ in range(after):
        collect(tokens, engine.step())
    engine.scheduler._preempt(engine.scheduler.running[-1])
    engine.check_integrity()
    outputs = engine.step()
    assert not only(outputs).admitted  # that is said once
    collect(tokens, outputs)
    assert tokens["r"] + run_to_end(engine)["r"] == expected


# --------------------------------------------------------------------- failures


def test_a_failing_step_ends_its_own_sequences_only(make_engine):
    model = MockModel()
    engine = make_engine(6, model, max_num_batched_tokens=8)
    cold = generate(engine, make_request("r", prompt_of(9)))["r"]
    engine.add(make_request("a", prompt_of(9)))
    engine.step()
    engine.add(make_request("b", prompt_of(6, seed=1)))
    engine.add(make_request("waits", prompt_of(13, seed=2)))
    model.next_error = RuntimeError("out of memory")
    outputs = engine.step()
    engine.check_integrity()
    assert [o.request_id for o in outputs] == ["b", "a"]
    assert outputs[0].admitted
    for output in outputs:
        assert "out of memory" in (output.error or "")
        assert (output.token_ids, output.finish_reason) == ([], None)
    tokens = run_to_end(engine)
    assert list(tokens) == ["waits"]
    assert generate(engine, make_request("r", prompt_of(9)))["r"] == cold
    assert is_idle(engine)


def test_a_block_of_a_failed_step_is_never_found(make_engine):
    model = MockModel()
    engine = make_engine(model=model)
    model.next_error = RuntimeError("boom")
    engine.add(make_request("r", prompt_of(9)))
    engine.step()
    engine.add(make_request("r", prompt_of(9)))
    assert only(engine.step()).num_cached_tokens == 0
    run_to_end(engine)


def test_logits_that_are_not_finite_end_their_sequence_with_an_error(make_engine):
    model = MockModel()
    forward = model.forward

    def broken(*args):
        logits = forward(*args)
        logits[0, 3] = float("nan")
        return logits

    model.forward = broken
    engine = make_engine(model=model)
    engine.add(make_request("a", prompt_of(5)))
    engine.add(make_request("b", prompt_of(6)))
    outputs = engine.step()
    assert "not finite" in (only(outputs, "a").error or "")
    assert len(only(outputs, "b").token_ids) == 1
    engine.abort("b")
    assert is_idle(engine)


@pytest.mark.parametrize("kind", ["waiting", "prefilling", "running", "held", "remote", "awaiting"])
def test_abort_frees_everything_in_any_state_and_twice(make_engine, kind):
    engine = make_engine(max_num_batched_tokens=4)
    request = make_request("r", prompt_of(3 if kind in ("running", "held") else 9))
    {"held": engine.add_prefill, "remote": engine.add_remote, "awaiting": engine.add_remote}.get(
        kind, engine.add
    )(request)
    if kind not in ("waiting", "remote"):
        engine.step()
    assert ("r" in engine.scheduler.held) == (kind == "held")
    engine.abort("r")
    engine.abort("r")
    engine.abort("never seen")
    engine.check_integrity()
    assert is_idle(engine)
    assert engine.step() == []
    engine.add(request)  # the id may be used again
    assert len(run_to_end(engine)["r"]) == 8
