"""The engine over a model whose output depends on what the paged cache holds."""

import random

import pytest
import torch

from core.config import EngineConfig
from core.errors import EngineError, RequestError
from core.types import FinishReason, GenerationRequest, KVBlockCounts
from engine.engine import Engine
from engine.types import SequenceOutput
from support.mock_model import MockModel, collect, make_request, run_to_end

B = 4


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are tiny here, and a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine():
    """Engines whose books are checked when the test is over."""
    engines: list[Engine] = []

    def make(num_blocks: int = 64, model: MockModel | None = None, **config) -> Engine:
        config.setdefault("block_size", B)
        engines.append(Engine(model or MockModel(), EngineConfig(**config), num_blocks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(101) for _ in range(length)]


def generate(engine: Engine, *requests: GenerationRequest) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return run_to_end(engine)


def is_idle(engine: Engine) -> bool:
    counts = engine.block_counts()
    return not engine.has_work() and counts.free + counts.cached == counts.total


def only(outputs: list[SequenceOutput], request_id: str = "r") -> SequenceOutput:
    (output,) = (o for o in outputs if o.request_id == request_id)
    return output


# ------------------------------------------------------------------ one engine


def test_a_request_from_admission_to_its_end(make_engine):
    engine = make_engine()
    engine.add(make_request("r", prompt_of(6), max_tokens=3))
    assert engine.has_work()
    first = only(engine.step())
    assert first.admitted
    assert first.block_table is None
    assert (len(first.token_ids), first.num_computed_tokens) == (1, 6)
    second = only(engine.step())
    assert (second.admitted, second.finish_reason) == (False, None)
    third = only(engine.step())
    assert third.finish_reason is FinishReason.LENGTH
    assert is_idle(engine)
    assert engine.step() == []
    assert not engine.made_progress
    stats = engine.stats()
    assert (stats.tokens_prefilled_total, stats.tokens_decoded_total) == (6, 2)
    assert (stats.requests_running, stats.requests_waiting) == (0, 0)


@pytest.mark.parametrize("chunk", [1, 7, B, B + 1, 64])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B, 29])
def test_chunk_size_changes_nothing(make_engine, chunk, length):
    """V67: same tokens and logprobs, exactly one first token."""
    request = make_request("r", prompt_of(length), temperature=1.0, seed=3, logprobs=2)
    whole, chunked = make_engine(), make_engine(max_num_batched_tokens=chunk)
    results = []
    for engine in (whole, chunked):
        engine.add(request)
        outputs = [o for _ in range(60) for o in engine.step()]
        assert sum(o.admitted for o in outputs) == 1
        tokens = [token for o in outputs for token in o.token_ids]
        logprobs = [entry for o in outputs for entry in o.logprobs or ()]
        assert len(tokens) == len(logprobs) == 8
        results.append((tokens, logprobs))
    assert results[0] == results[1]


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 2 * B + 1, 20])
def test_warm_equals_cold(make_engine, length):
    """V65: a prompt that is in the prefix cache, wholly or not, gives the same text."""
    engine = make_engine()
    cold = generate(engine, make_request("r", prompt_of(length)))
    prefilled = engine.stats().tokens_prefilled_total
    engine.add(make_request("r", prompt_of(length)))
    output = only(engine.step())
    expected_hit = (length - 1) // B * B
    assert output.num_cached_tokens == expected_hit
    assert engine.stats().tokens_prefilled_total - prefilled == length - expected_hit
    assert engine.stats().prefix_hit_tokens_total == expected_hit
    warm = run_to_end(engine)
    assert output.token_ids + warm["r"] == cold["r"]


def test_logits_are_made_only_where_a_token_is_sampled(make_engine):
    model = MockModel()
    engine = make_engine(model=model, max_num_batched_tokens=4)
    generate(engine, make_request("r", prompt_of(10), max_tokens=2))
    assert model.num_rows == [0, 0, 1, 1]


def test_outputs_are_cached_too(make_engine):
    engine = make_engine()
    prompt = prompt_of(6)
    answer = generate(engine, make_request("r", prompt, max_tokens=7))["r"]
    turn = [*prompt, *answer, 5, 6, 7]
    engine.add(make_request("r", turn))
    assert only(engine.step()).num_cached_tokens == 12  # the 13th token's KV was never made
    run_to_end(engine)


def test_salts_share_nothing(make_engine):
    engine = make_engine()
    prompt = prompt_of(13)
    hits = []
    for salt in ("", "a", "b", "a", ""):
        engine.add(make_request("r", prompt, cache_salt=salt))
        hits.append(only(engine.step()).num_cached_tokens)
        run_to_end(engine)
    assert hits == [0, 0, 0, 12, 12]


def test_without_prefix_caching_there_are_no_hits(make_engine):
    engine = make_engine(enable_prefix_caching=False)
    first = generate(engine, make_request("r", prompt_of(13)))
    assert generate(engine, make_request("r", prompt_of(13))) == first
    assert engine.stats().prefix_hit_tokens_total == 0
    assert engine.block_counts() == KVBlockCounts(total=64, free=64)


def test_stop_token_max_tokens_and_context_end_a_sequence(make_engine):
    """V17, V41: also when the token that ends it is the first."""
    engine = make_engine(max_model_len=16)
    tokens = generate(engine, make_request("r", prompt_of(5)))["r"]

    def run(prompt_length: int = 5, **sampling) -> tuple[list[int], FinishReason | None]:
        engine.add(make_request("r", prompt_of(prompt_length), **sampling))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        return [t for o in outputs for t in o.token_ids], outputs[-1].finish_reason

    assert run(max_tokens=1) == (tokens[:1], FinishReason.LENGTH)
    assert run(max_tokens=2) == (tokens[:2], FinishReason.LENGTH)
    assert run(stop_token_ids=(tokens[0],)) == (tokens[:1], FinishReason.STOP)
    assert run(stop_token_ids=(100, tokens[2])) == (tokens[:3], FinishReason.STOP)
    assert run(max_tokens=1, stop_token_ids=(tokens[0],)) == (tokens[:1], FinishReason.STOP)
    assert run(logit_bias={9: 100.0}, stop_token_ids=(9,)) == ([9], FinishReason.STOP)
    cut, reason = run(max_tokens=1000)
    assert (cut[:8], len(cut), reason) == (tokens, 11, FinishReason.LENGTH)
    assert len(run(prompt_length=15, max_tokens=1000)[0]) == 1
    banned, _ = run(min_tokens=2, stop_token_ids=(tokens[0],))
    assert tokens[0] not in banned[:2]


def test_the_context_is_the_smallest_of_three_limits(make_engine):
    model = MockModel(max_model_len=50)
    assert make_engine(64, model).max_model_len == 50
    assert make_engine(64, model, max_model_len=20).max_model_len == 20
    assert make_engine(64, model, max_model_len=80).max_model_len == 50
    assert make_engine(5, model).max_model_len == 20


def test_a_sequence_may_fill_the_whole_pool(make_engine):
    engine = make_engine(5, max_model_len=500)
    tokens = generate(engine, make_request("r", prompt_of(18), max_tokens=99))["r"]
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request("r", prompt_of(32)), "prompt"),
        (make_request("r", prompt_of(20), output=prompt_of(12), max_tokens=99), "prompt"),
        (make_request("r", []), "prompt"),
        (make_request("r", [5, 101]), "prompt"),
        (make_request("r", [-1]), "prompt"),
        (make_request("r", [5], logit_bias={101: 1.0}), "logit_bias"),
        (make_request("r", [5], logit_bias={-1: 1.0}), "logit_bias"),
        (make_request("r", [5], logit_bias={1: float("nan")}), "logit_bias"),
        (make_request("r", [5], temperature=float("nan")), "temperature"),
        (make_request("r", [5], temperature=-1.0), "temperature"),
        (make_request("r", [5], temperature=float("inf")), "temperature"),
        (make_request("r", [5], repetition_penalty=0.0), "repetition_penalty"),
        (make_request("r", [5], presence_penalty=float("nan")), "presence_penalty"),
        (make_request("r", [5], frequency_penalty=float("inf")), "frequency_penalty"),
        (make_request("r", [5], logprobs=-1), "logprobs"),
        (make_request("r", [5], max_tokens=0), "max_tokens"),
        (make_request("r", [5], output=[1, 2], max_tokens=2), "max_tokens"),
        (make_request("busy", [5]), "request_id"),
    ],
)
def test_what_cannot_be_computed_is_refused(make_engine, request_, param):
    """V34, V41: and the engine goes on."""
    engine = make_engine(max_model_len=32)
    engine.add(make_request("busy", prompt_of(31)))
    for add in (engine.add, engine.add_prefill, engine.add_remote):
        with pytest.raises(RequestError) as caught:
            add(request_)
        assert caught.value.param == param
    assert len(run_to_end(engine)["busy"]) == 1


def test_a_resumed_request_goes_on_as_if_it_had_not_stopped(make_engine):
    sampling = {
        "temperature": 1.0,
        "seed": 7,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "max_tokens": 10,
    }
    whole = generate(make_engine(), make_request("r", prompt_of(9), **sampling))["r"]
    for count in (1, 4, 9):
        request = make_request("r", prompt_of(9), output=whole[:count], **sampling)
        assert generate(make_engine(), request)["r"] == whole[count:]


# ---------------------------------------------------- batches, pressure, dice


def mixed_requests(count: int, seed: int, longest: int) -> list[GenerationRequest]:
    """Prompts that share prefixes, with all kinds of sampling."""
    rng = random.Random(seed)
    stems = [prompt_of(longest, stem) for stem in range(4)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randint(0, longest // 2)]
        tail = [rng.randrange(101) for _ in range(rng.randint(1, longest - len(stem)))]
        requests.append(
            make_request(
                f"r{index}",
                stem + tail,
                max_tokens=rng.randint(1, 24),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.getrandbits(32),
                top_p=rng.choice([1.0, 0.9]),
                presence_penalty=rng.choice([0.0, 0.5]),
                stop_token_ids=(rng.randrange(101),),
                cache_salt=rng.choice(["", "", "s"]),
            )
        )
    return requests


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
    assert engine.is_held("r") == (kind == "held")
    engine.abort("r")
    engine.abort("r")
    engine.abort("never seen")
    engine.check_integrity()
    assert is_idle(engine)
    assert engine.step() == []
    engine.add(request)  # the id may be used again
    assert len(run_to_end(engine)["r"]) == 8


# ------------------------------------------------------------------ the hand-over


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
        assert self.p.is_held(request_id)
        reserved = self.reserved.pop(request_id)
        known = reserved.num_cached_tokens // B
        source, target = self.tables[request_id][known:], reserved.block_table[known:]
        assert self.p.block_table(request_id)[known:] == source
        assert self.d.block_table(request_id)[known:] == target
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
    assert pair.p.is_held("r")
    assert not pair.p.has_work()
    assert pair.p.block_counts() == KVBlockCounts(total=64, free=61, held=3)

    pair.d.add_remote(request)
    reserved = only(pair.d.step())
    assert (reserved.admitted, reserved.block_table) == (True, [0, 1, 2])
    assert not pair.d.has_work()
    assert pair.d.block_counts() == KVBlockCounts(total=64, free=61, awaiting=3)
    assert pair.d.stats().requests_running == 1
    pair.d.kv_cache[reserved.block_table] = pair.p.kv_cache[pair.p.block_table("r")]
    pair.p.release("r")
    pair.p.release("r")
    assert not pair.p.is_held("r")
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
    assert not engine.is_held("r")
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


@pytest.mark.parametrize("with_first_token", [True, False])
def test_a_transfer_that_fails_is_computed_here(make_engine, with_first_token):
    request = make_request("r", prompt_of(10), temperature=1.0, seed=4)
    expected = generate(make_engine(), request)["r"]
    engine = make_engine()
    engine.add_remote(request)
    (reserved,) = engine.step()
    engine.kv_cache[reserved.block_table] = 77  # what arrived of it
    engine.fall_back("r", expected[0] if with_first_token else None)
    assert run_to_end(engine)["r"] == expected[with_first_token:]
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
    """Transfers end in random order, some fail, some requests are dropped on D: every answer is
    the one of a single engine, and no side ever waits for the other's blocks."""
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
                pair.p.release(request_id)
                pair.d.fall_back(request_id, pair.first.pop(request_id))
            elif draw < 0.6:
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
    for call in (engine.block_table, engine.fall_back):
        with pytest.raises(EngineError, match="gone is not known"):
            call("gone")
    engine.abort("r")
    engine.add_remote(make_request("r", prompt_of(5)))
    engine.step()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.start_decode("r", 101)
    engine.abort("r")


def test_the_kv_cache_is_one_piece_that_never_moves(make_engine):
    engine = make_engine()
    address = engine.kv_cache.data_ptr()
    assert engine.kv_cache.is_contiguous()
    assert engine.kv_cache.shape == (64, 1, 2, 1, B, 1)
    generate(engine, make_request("r", prompt_of(9)))
    assert engine.kv_cache.data_ptr() == address
    assert isinstance(engine.kv_cache, torch.Tensor)
    assert not engine.kv_cache.is_inference()  # transports may write into it
