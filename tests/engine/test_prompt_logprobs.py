"""Logprobs of the prompt: those of transformers, whatever the chunks, the cache and the company."""

import pytest
import torch
from transformers import LlamaForCausalLM

from core.config import EngineConfig
from core.errors import RequestError
from core.model_files import resolve_model
from core.types import FinishReason, TokenLogprobs
from engine.engine import Engine
from engine.model.load import load_model
from engine.scheduler import MAX_SCORED_TOKENS
from support.mock_model import MockModel, make_request


def run(engine: Engine) -> dict[str, tuple[list[TokenLogprobs], list[int], FinishReason | None]]:
    found: dict[str, tuple[list[TokenLogprobs], list[int], FinishReason | None]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            scores, tokens, _ = found.get(output.request_id, ([], [], None))
            found[output.request_id] = (
                scores + (output.prompt_logprobs or []),
                tokens + output.token_ids,
                output.finish_reason,
            )
        engine.check_integrity()
    return found


def mock_engine(num_kv_blocks: int = 64, **config: object) -> Engine:
    options = {"block_size": 4, "max_num_batched_tokens": 64, **config}
    return Engine(MockModel(), EngineConfig(**options), num_kv_blocks)


def test_loglikelihoods_equal_transformers(tiny_model_dir):
    """As lm-eval asks for them: a context and a continuation, scored and not continued."""
    reference = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model = load_model(resolve_model(str(tiny_model_dir)), "float32")
    config = EngineConfig(block_size=8, max_num_batched_tokens=13)  # chunks across blocks
    engine = Engine(model, config, 64)
    prompts = {"short": [7, 3], "long": [(i * i + 3) % 256 for i in range(40)], "one": [9]}
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, max_tokens=0, prompt_logprobs=3))
    found = run(engine)
    for name, prompt in prompts.items():
        scores, tokens, reason = found[name]
        assert tokens == [] and reason is FinishReason.LENGTH
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert len(scores) == len(prompt) - 1
        for i, entry in enumerate(scores):
            assert entry.logprob == pytest.approx(expected[i, prompt[i + 1]].item(), abs=1e-4)
            best = expected[i].topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values, abs=1e-4)


@pytest.mark.parametrize("budget", [3, 8, 64])
def test_chunks_and_company_change_nothing(budget):
    def scores(budget: int, others: int) -> list[TokenLogprobs]:
        engine = mock_engine(max_num_batched_tokens=budget)
        for i in range(others):
            engine.add(make_request(f"other{i}", range(i, i + 9)))
        engine.add(make_request("x", range(20, 41), prompt_logprobs=2, max_tokens=3))
        found = run(engine)
        assert len(found["x"][1]) == 3
        assert all(not found[f"other{i}"][0] for i in range(others))
        return found["x"][0]

    assert scores(budget, 2) == scores(64, 0)
    assert len(scores(budget, 0)) == 20


def test_the_prefix_cache_is_filled_but_not_used():
    engine = mock_engine()
    expected = None
    for name in ("cold", "warm"):
        engine.add(make_request(name, range(21), max_tokens=0, prompt_logprobs=0))
        admitted = engine.step()[0]
        assert admitted.num_cached_tokens == 0
        expected = expected or admitted.prompt_logprobs
        assert admitted.prompt_logprobs == expected and len(expected) == 20
    engine.add(make_request("plain", range(21)))
    assert engine.step()[0].num_cached_tokens == 20


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_preemption_reports_nothing_twice(num_blocks):
    engine = mock_engine(num_blocks, max_num_batched_tokens=8)
    for name in ("x", "y"):
        engine.add(make_request(name, range(10, 22), max_tokens=14, prompt_logprobs=1))
    found = run(engine)
    assert (engine.stats().preemptions_total > 0) == (num_blocks == 9)
    assert len(found["x"][0]) == 11 and found["x"] == found["y"]


def test_a_step_scores_a_bounded_number_of_tokens():
    engine = mock_engine(512, max_num_batched_tokens=2048)
    for name in ("x", "y", "z"):
        engine.add(make_request(name, [1, 2, 3] * 200, max_tokens=0, prompt_logprobs=0))
    found = run(engine)
    assert {len(scores) for scores, _, _ in found.values()} == {599}
    assert max(engine.model.num_rows) <= MAX_SCORED_TOKENS + 3  # type: ignore[attr-defined]


def test_a_peer_that_computes_the_prompt_reports_it_even_if_it_is_computed_again_here():
    engine = mock_engine()
    engine.add_remote(make_request("x", range(9), prompt_logprobs=1))
    engine.step()
    engine.start_decode("x", 5)
    engine.scheduler._preempt(engine.scheduler.running[0])
    assert run(engine)["x"][0] == []


def test_no_tokens_need_a_score_and_may_fill_the_context():
    engine = mock_engine(max_model_len=16)
    with pytest.raises(RequestError, match="max_tokens"):
        engine.add(make_request("x", range(5), max_tokens=0))
    engine.add(make_request("x", range(16), max_tokens=0, prompt_logprobs=0))
    with pytest.raises(RequestError, match="context"):
        engine.add(make_request("y", range(17), max_tokens=0, prompt_logprobs=0))
    assert len(run(engine)["x"][0]) == 15
