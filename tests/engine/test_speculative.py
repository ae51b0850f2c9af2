"""Speculative decoding changes how many steps an output takes, and nothing else."""

import random

import numpy as np
import pytest

from core.config import EngineConfig, SpeculativeConfig
from core.model_files import resolve_model
from core.types import FinishReason, TokenLogprobs
from engine.engine import Engine
from engine.model.load import load_model
from engine.speculative import Speculation, _lookup, usable_prefix
from support.byte_tokenizer import EOS, VOCAB_SIZE
from support.grammars import matcher_of, regex
from support.mock_model import MockModel, make_request

PROMPTS = {"x": range(10, 21), "y": range(30, 34), "z": range(50, 67)}
# What a request may ask for; each must come out as it does without a guess.
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.8,
        "repetition_penalty": 1.3, "logit_bias": {5: 3.0},
    },
    "min_tokens": {"temperature": 1.0, "stop_token_ids": tuple(range(40)), "min_tokens": 9},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
}  # fmt: skip


class Guesser:
    """Knows the outputs, and is wrong in a share of its tokens."""

    def __init__(self, answers: dict[str, list[int]], wrong: float) -> None:
        self.answers = answers
        self.wrong = wrong
        self.dice = random.Random(3)

    def propose(self, wants, budget: int, make_room) -> int:
        for seq, limit in wants:
            draft = self._guess(seq, min(limit, budget))
            seq.draft = draft[: make_room(seq, len(draft))]
            budget -= len(seq.draft)
        return sum(len(seq.draft) for seq, _ in wants)

    def _guess(self, seq, limit: int) -> list[int]:
        count = seq.num_output_tokens
        draft = self.answers[seq.request_id][count : count + limit]
        draft = [self.dice.randrange(VOCAB_SIZE) if self.dice.random() < self.wrong else token
                 for token in draft]  # fmt: skip
        return usable_prefix(seq, draft)


def make_engine(num_kv_blocks: int = 64, **config: object) -> Engine:
    options = {"block_size": 4, "max_num_batched_tokens": 64, **config}
    return Engine(MockModel(VOCAB_SIZE), EngineConfig(**options), num_kv_blocks)


Result = dict[str, tuple[list[int], FinishReason | None, list[TokenLogprobs]]]


def run(engine: Engine, pattern: str = "", **sampling: object) -> tuple[Result, int]:
    """Tokens, finish reason and logprobs by request, and how many steps it took."""
    options = {"max_tokens": 24, **sampling}
    if pattern:
        options |= {"grammar": regex(pattern), "stop_token_ids": (EOS,)}
    for seed, (name, prompt) in enumerate(PROMPTS.items()):
        matcher = matcher_of(regex(pattern)) if pattern else None
        engine.add(make_request(name, prompt, seed=seed, **options), matcher)
    result: Result = {name: ([], None, []) for name in PROMPTS}
    num_steps = 0
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            tokens, _, logprobs = result[output.request_id]
            tokens += output.token_ids
            logprobs += output.logprobs or []
            result[output.request_id] = (tokens, output.finish_reason, logprobs)
        engine.check_integrity()
        num_steps += 1
        assert num_steps < 1000
    return result, num_steps


def run_guessing(result: Result, num_tokens: int, wrong: float, engine: Engine, **kind: object):
    answers = {name: tokens for name, (tokens, _, _) in result.items()}
    guesser = Guesser(answers, wrong)
    engine._speculation = Speculation(guesser, num_tokens, engine.max_model_len)
    engine.scheduler._propose = engine._speculation.propose
    return run(engine, **kind)


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_same_with_any_guesses(kind):
    plain, num_plain = run(make_engine(), **KINDS[kind])
    for num_tokens, wrong in ((1, 0.0), (8, 0.0), (3, 0.3), (8, 1.0)):
        engine = make_engine()
        guessed, num_steps = run_guessing(plain, num_tokens, wrong, engine, **KINDS[kind])
        assert guessed == plain
        stats = engine.stats()
        assert 0 <= stats.tokens_draft_accepted_total <= stats.tokens_drafted_total
        if not wrong:
            assert stats.tokens_draft_accepted_total == stats.tokens_drafted_total > 0
            longest = max(len(tokens) for tokens, _, _ in plain.values())
            assert num_steps <= num_plain - longest // 2 + 3
        num_output = sum(len(tokens) for tokens, _, _ in plain.values())
        assert stats.tokens_decoded_total == num_output - len(PROMPTS)  # first ones: prefill


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_a_grammar_is_held_within_an_accepted_run(wrong):
    pattern = "([a-e]{2}-){3}(x|yy)?"
    plain, _ = run(make_engine(), pattern, temperature=1.0)
    guessed, _ = run_guessing(plain, 5, wrong, make_engine(), pattern=pattern, temperature=1.0)
    assert guessed == plain
    assert {reason for _, reason, _ in plain.values()} == {FinishReason.STOP}


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_a_stop_token_and_a_limit_inside_an_accepted_run_are_exact(num_tokens):
    whole, _ = run(make_engine(), temperature=1.0)
    for end in range(2, 11, 2):
        stops = (whole["x"][0][end],)
        for options in ({"stop_token_ids": stops}, {"max_tokens": end}):
            plain, _ = run(make_engine(), temperature=1.0, **options)
            engine = make_engine()
            guessed, _ = run_guessing(whole, num_tokens, 0.0, engine, temperature=1.0, **options)
            assert guessed == plain


def test_the_model_length_is_exact():
    options = {"max_model_len": 23, "max_num_seqs": 8}
    plain, _ = run(make_engine(**options), max_tokens=100)
    assert {len(PROMPTS[name]) + len(tokens) for name, (tokens, _, _) in plain.items()} == {23}
    assert run_guessing(plain, 6, 0.2, make_engine(**options), max_tokens=100)[0] == plain


@pytest.mark.parametrize("num_blocks", [12, 16, 20])
@pytest.mark.parametrize("budget", [4, 64])
def test_guesses_never_cost_somebody_else_blocks_or_budget(num_blocks, budget):
    plain, _ = run(make_engine(), temperature=1.0)
    without = make_engine(num_blocks, max_num_batched_tokens=budget)
    assert run(without, temperature=1.0)[0] == plain
    engine = make_engine(num_blocks, max_num_batched_tokens=budget)
    assert run_guessing(plain, 6, 0.3, engine, temperature=1.0)[0] == plain
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the latest
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3]),  # the longest
        ([5, 5, 5, 5], 2, [5]),  # the first has most behind it
        ([5, 5, 5, 5, 5], 2, [5, 5]),
        ([1, 2, 3], 4, []),
        ([2, 9, 2], 4, []),  # one token is not enough
        ([1], 4, []),
    ],
)
def test_what_the_lookup_finds(tokens, limit, expected):
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3)
    assert _lookup(np.array(tokens, dtype=np.int32), limit, config) == expected


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 20), (0.4, 1)])
def test_a_real_model_that_repeats_itself_takes_fewer_steps(tiny_model_dir, temperature, least):
    model = load_model(resolve_model(str(tiny_model_dir)), "float32")
    speculative = SpeculativeConfig(method="ngram", num_tokens=4, prompt_lookup_min=1)
    results, accepted = [], []
    for setting in (None, speculative):
        config = EngineConfig(block_size=8, max_num_batched_tokens=64, speculative=setting)
        engine = Engine(model, config, 128)
        # A penalty below 1 is a reward: it makes a random model say the same again.
        sampling = {"temperature": temperature, "repetition_penalty": 0.7}
        results.append(run(engine, max_tokens=60, **sampling)[0])
        accepted.append(engine.stats().tokens_draft_accepted_total)
    assert results[0] == results[1]
    assert accepted[0] == 0 and accepted[1] >= least
