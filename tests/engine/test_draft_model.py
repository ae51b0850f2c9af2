"""Speculative decoding with a draft model. The mock model's answer depends on what its own paged
cache holds: as its own draft it is right only as long as the draft's KV is complete and right."""

from typing import Any

import pytest
import torch

from core.config import EngineConfig, SpeculativeConfig
from core.model_files import resolve_model
from core.types import GenerationRequest
from engine.engine import Engine
from engine.model.load import load_model
from support.byte_tokenizer import EOS, VOCAB_SIZE
from support.grammars import matcher_of, regex
from support.mock_model import MockModel, block_table_of, collect, make_request, run_to_end
from support.tiny_models import make_tiny, random_ids, save_tiny

B = 4
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "penalised": {
        "temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.8, "top_k": 20,
        "repetition_penalty": 1.3, "logit_bias": {5: 3.0},
    },
    "min_tokens": {"temperature": 1.0, "stop_token_ids": tuple(range(40)), "min_tokens": 9},
}  # fmt: skip


class OtherModel(MockModel):
    """Its logits are those of the mock model in two of three positions, and its own elsewhere."""

    def _logits(self, table: list[int], position: int) -> torch.Tensor:
        logits = super()._logits(table, position)
        return logits if position % 3 else logits.flip(0)


@pytest.fixture
def make_engine():
    """Engines whose books are checked when the test is over."""
    engines: list[Engine] = []

    def make(draft: Any = None, num_blocks: int = 64, num_tokens: int = 3, **config: Any) -> Engine:
        setting = SpeculativeConfig(method="draft_model", model="d", num_tokens=num_tokens)
        options = {"block_size": B, "max_num_batched_tokens": 64, **config}
        engine = Engine(
            MockModel(VOCAB_SIZE),
            EngineConfig(**options, speculative=setting),
            num_blocks,
            draft=draft,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.check_integrity()
        assert draft_of(engine) is None or not draft_of(engine).has_failed


def draft_of(engine: Engine) -> Any:
    return engine._speculation and engine._speculation._proposer


def rate(engine: Engine) -> float:
    stats = engine.stats()
    return stats.tokens_draft_accepted_total / max(1, stats.tokens_drafted_total)


def requests(**sampling: Any) -> list[GenerationRequest]:
    prompts = {"x": range(10, 21), "y": range(30, 34), "z": range(50, 67)}
    options = {"max_tokens": 24, **sampling}
    return [
        make_request(name, prompt, seed=seed, **options)
        for seed, (name, prompt) in enumerate(prompts.items())
    ]


def generate(engine: Engine, *some: GenerationRequest) -> dict[str, list[int]]:
    for request in some:
        matcher = request.sampling.grammar and matcher_of(request.sampling.grammar)
        engine.add(request, matcher)
    return run_to_end(engine)


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_equals_the_target_is_always_right(make_engine, kind, num_tokens):
    plain = generate(make_engine(), *requests(**KINDS[kind]))
    engine = make_engine(MockModel(VOCAB_SIZE), num_tokens=num_tokens)
    assert generate(engine, *requests(**KINDS[kind])) == plain
    assert rate(engine) == 1.0 and engine.stats().tokens_drafted_total > 10


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_often_wrong_changes_nothing(make_engine, kind, num_tokens):
    plain = generate(make_engine(), *requests(**KINDS[kind]))
    engine = make_engine(OtherModel(VOCAB_SIZE), num_tokens=num_tokens)
    assert generate(engine, *requests(**KINDS[kind])) == plain
    assert 0 < rate(engine) < 0.9


@pytest.mark.parametrize("draft", [MockModel, OtherModel])
def test_a_grammar_is_held(make_engine, draft):
    options = {"temperature": 1.0, "stop_token_ids": (EOS,)}
    grammar = regex("([a-e]{2}-){3}(x|yy)?")
    plain = generate(make_engine(), *requests(grammar=grammar, **options))
    engine = make_engine(draft(VOCAB_SIZE), num_tokens=5)
    assert generate(engine, *requests(grammar=grammar, **options)) == plain
    assert rate(engine) == 1.0 if draft is MockModel else 0 < rate(engine) < 1


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_a_stop_token_and_a_limit_inside_an_accepted_run_are_exact(make_engine, num_tokens):
    whole = generate(make_engine(), *requests())["x"]
    for end in range(2, 11, 2):
        for options in ({"stop_token_ids": (whole[end],)}, {"max_tokens": end}):
            plain = generate(make_engine(), *requests(**options))
            engine = make_engine(MockModel(VOCAB_SIZE), num_tokens=num_tokens)
            assert generate(engine, *requests(**options)) == plain
            stats = engine.stats()
            assert stats.tokens_decoded_total == sum(map(len, plain.values())) - len(plain)
    engine = make_engine(MockModel(VOCAB_SIZE), num_tokens=num_tokens, max_model_len=23)
    for request, tokens in zip(requests(), generate(engine, *requests()).values(), strict=True):
        assert len(request.prompt_token_ids) + len(tokens) == 23


@pytest.mark.parametrize("budget", [5, 9])
def test_a_long_prompt_is_caught_up_with_in_chunks(make_engine, budget):
    """A sequence that is caught up already goes on guessing meanwhile."""
    some = [
        make_request("short", range(5), max_tokens=40),
        make_request("long", random_ids(50), max_tokens=40),
    ]
    plain = generate(make_engine(), *some)
    engine = make_engine(MockModel(VOCAB_SIZE), max_num_batched_tokens=budget)
    assert generate(engine, *some) == plain
    assert rate(engine) == 1.0 and engine.stats().tokens_drafted_total > 20


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 16, 40])
def test_after_a_preemption(make_engine, num_blocks, prefix_caching):
    config = {"enable_prefix_caching": prefix_caching}
    plain = generate(make_engine(), *requests(temperature=1.0))
    engine = make_engine(MockModel(VOCAB_SIZE), num_blocks, **config)
    assert generate(engine, *requests(temperature=1.0)) == plain
    assert (engine.stats().preemptions_total > 0) == (num_blocks < 40)
    assert rate(engine) == 1.0
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize("seed", range(3))
def test_many_sequences_through_few_blocks(make_engine, seed):
    """Prefixes shared, evicted and computed again: the draft never reads another's KV."""
    some = []
    for index in range(40):
        prompt = [*random_ids(4 * (index % 5), seed), *random_ids(1 + 3 * (index % 4), index)]
        some.append(make_request(f"r{index}", prompt, max_tokens=3 + index % 29, seed=index,
                                 temperature=index % 2, cache_salt="s" * (index % 3)))  # fmt: skip
    plain = generate(make_engine(num_blocks=256), *some)
    engine = make_engine(MockModel(VOCAB_SIZE), 16, max_num_batched_tokens=17)
    assert generate(engine, *some) == plain
    assert engine.stats().preemptions_total > 0
    assert rate(engine) == 1.0


def test_the_prefix_cache_serves_the_draft_too(make_engine):
    engine = make_engine(MockModel(VOCAB_SIZE))
    answer = generate(engine, make_request("r", range(30), max_tokens=12))["r"]
    before = draft_of(engine).num_computed
    turn = [*range(30), *answer, *range(60, 66)]
    generate(engine, make_request("again", turn, max_tokens=5))
    # Of the 48 tokens 41 are known to the target, and most of those to the draft.
    assert draft_of(engine).num_computed - before < 24
    assert rate(engine) == 1.0


@pytest.mark.parametrize("pattern", [None, "[a-e]{28}z?"])
@pytest.mark.parametrize("budget", [7, 64])
def test_after_a_hand_over_the_draft_reads_the_prompt_itself(make_engine, budget, pattern):
    grammar = regex(pattern) if pattern else None
    request = make_request("r", range(21), max_tokens=30, grammar=grammar,
                           stop_token_ids=(EOS,))  # fmt: skip
    matchers = [matcher_of(grammar) if grammar else None for _ in range(2)]
    expected = generate(make_engine(), request)["r"]
    source, target = (
        make_engine(),
        make_engine(MockModel(VOCAB_SIZE), max_num_batched_tokens=budget),
    )
    source.add_prefill(request, matchers[0])
    tokens: dict[str, list[int]] = {}
    while "r" not in source.scheduler.held:
        collect(tokens, source.step())
    target.add_remote(request, matchers[1])
    (admitted,) = target.step()
    assert admitted.block_table is not None
    target.kv_cache[admitted.block_table] = source.kv_cache[block_table_of(source, "r")]
    source.release("r")
    target.start_decode("r", tokens["r"][0])
    assert tokens["r"] + run_to_end(target)["r"] == expected
    assert target.stats().tokens_prefilled_total == 0
    assert rate(target) == 1.0 and target.stats().tokens_drafted_total >= 15


def test_a_sequence_whose_guesses_fail_pauses_and_comes_back(make_engine):
    class Wrong(MockModel):
        is_wrong = True

        def _logits(self, table: list[int], position: int) -> torch.Tensor:
            logits = super()._logits(table, position)
            return -logits if self.is_wrong else logits

    draft = Wrong(VOCAB_SIZE)
    engine = make_engine(draft, num_tokens=1, num_blocks=128)
    engine.add(make_request("r", range(9), max_tokens=300))
    expected = generate(make_engine(num_blocks=128), make_request("r", range(9), max_tokens=300))
    tokens: dict[str, list[int]] = {}
    drafted = []
    for _ in range(60):
        collect(tokens, engine.step())
        drafted.append(engine.stats().tokens_drafted_total)
    # The prompt, 8 failures, a pause of 16 steps, one more failure, a pause of 32.
    assert drafted[8:25] == [8] * 17 and drafted[25:58] == [9] * 33 and drafted[58] == 10
    assert engine.stats().draft_pauses_total == 3
    draft.is_wrong = False
    tokens["r"] += run_to_end(engine)["r"]
    assert tokens == expected
    stats = engine.stats()
    assert stats.tokens_draft_accepted_total == stats.tokens_drafted_total - 10 > 20


def test_a_draft_model_that_fails_is_done_without(caplog):
    draft = MockModel(VOCAB_SIZE)
    setting = SpeculativeConfig(method="draft_model", model="d")
    config = EngineConfig(block_size=B, speculative=setting)
    engine = Engine(MockModel(VOCAB_SIZE), config, 64, draft=draft)
    plain = generate(Engine(MockModel(VOCAB_SIZE), EngineConfig(block_size=B), 64), *requests())
    for request in requests():
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    for _ in range(3):
        collect(tokens, engine.step())
    draft.next_error = RuntimeError("out of memory")
    collect(tokens, engine.step())
    drafted = engine.stats().tokens_drafted_total
    for name, rest in run_to_end(engine).items():
        tokens[name] += rest
    assert tokens == plain and engine.stats().tokens_drafted_total == drafted > 0
    assert "the draft model failed" in caplog.text


@pytest.mark.parametrize("size", [VOCAB_SIZE - 20, VOCAB_SIZE + 20])
def test_a_table_of_another_size_is_padded_or_cut(make_engine, size):
    """Models of one tokenizer pad their embeddings to different sizes."""
    plain = generate(make_engine(), *requests(temperature=1.0))
    engine = make_engine(MockModel(size))
    assert generate(engine, *requests(temperature=1.0)) == plain
    assert engine.stats().tokens_drafted_total > 0


def test_a_short_draft_context_ends_guesses_early(make_engine):
    plain = generate(make_engine(), *requests())
    engine = make_engine(MockModel(VOCAB_SIZE, max_model_len=30))
    assert generate(engine, *requests()) == plain
    assert rate(engine) == 1.0
    assert draft_of(engine).kv_cache[:, 0, 1].max() < 30  # the mock's KV has positions


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_real_models(tmp_path, temperature):
    """The target as its own draft agrees with itself but for rounding; another family's random
    weights never change the output. In float32."""
    files = save_tiny(make_tiny("qwen3"), tmp_path / "target")
    other = save_tiny(make_tiny("gemma2", seed=5), tmp_path / "other")
    target, same, draft = (
        load_model(resolve_model(str(f.path)), "float32") for f in (files, files, other)
    )
    some = [
        make_request(f"r{i}", random_ids(9 + 8 * i, i), max_tokens=30, seed=i,
                     temperature=temperature) for i in range(3)
    ]  # fmt: skip
    results, rates = [], []
    for model in (None, same, draft):
        setting = SpeculativeConfig(method="draft_model", model="d", num_tokens=4)
        config = EngineConfig(block_size=8, max_num_batched_tokens=32, speculative=setting)
        engine = Engine(target, config, 64, draft=model)
        results.append(generate(engine, *some))
        rates.append(rate(engine))
    assert results[0] == results[1] == results[2]
    assert rates[1] == 1.0 and rates[2] < 0.5
