"""Embeddings of prompts: the mean, or the last, of transformers' own final hidden states."""

from typing import Any

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.errors import RequestError
from core.types import FinishReason, GenerationRequest, Pooling, SamplingParams
from engine.engine import Engine
from engine.model.load import load_model
from engine.types import SequenceOutput
from support.mock_model import MockModel, make_request
from support.tiny_models import make_tiny, random_ids, save_tiny

FAMILIES = ["llama", "gemma2", "qwen3-moe", "deepseek-v2"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers model, our model)."""
    model = make_tiny(request.param)
    return model, load_model(save_tiny(model, tmp_path_factory.mktemp("tiny")), "float32")


def make_engine(model: Any, num_kv_blocks: int = 64, **fields: Any) -> Engine:
    known = {"block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 8}
    return Engine(model, EngineConfig(**{**known, **fields}), num_kv_blocks)


def embed(name: str, ids: list[int], pooling: Pooling, salt: str = "") -> GenerationRequest:
    sampling = SamplingParams(max_tokens=0, pooling=pooling)
    return GenerationRequest(name, tuple(ids), sampling, cache_salt=salt)


def run(engine: Engine) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            outputs.setdefault(output.request_id, []).append(output)
    engine.check_integrity()
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
    return outputs


def expected(reference: Any, ids: list[int], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        states = reference.model(torch.tensor([ids])).last_hidden_state[0]
    return (states.mean(0) if pooling is Pooling.MEAN else states[-1]).numpy()


def check(output: SequenceOutput, wanted: np.ndarray) -> None:
    assert output.finish_reason is FinishReason.LENGTH and not output.token_ids
    np.testing.assert_allclose(np.frombuffer(output.embedding, "<f4"), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_equals_transformers_in_chunks_among_others(pair: Any, pooling: Pooling) -> None:
    """Several prompts at once, in chunks of 7 tokens and less, beside one that generates."""
    reference, model = pair
    engine = make_engine(model)
    prompts = {f"e{n}": random_ids(n, seed=n) for n in (1, 4, 7, 13, 30)}
    engine.add(make_request("text", random_ids(9), max_tokens=12))
    for name, ids in prompts.items():
        engine.add_prefill(embed(name, ids, pooling), hold=False)
    outputs = run(engine)
    for name, ids in prompts.items():
        check(outputs[name][-1], expected(reference, ids, pooling))
        assert all(not output.embedding for output in outputs[name][:-1])
    said = [token for output in outputs["text"] for token in output.token_ids]
    alone = make_engine(model)
    alone.add(make_request("text", random_ids(9), max_tokens=12))
    assert said == [token for output in run(alone)["text"] for token in output.token_ids]


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_the_prefix_cache_serves_the_last_token_alone(pair: Any) -> None:
    """A mean needs every token's state; both leave their blocks to others."""
    reference, model = pair
    engine = make_engine(model)
    ids = random_ids(22)
    for name, pooling, hit in (
        ("cold", Pooling.MEAN, 0), ("again", Pooling.MEAN, 0), ("last", Pooling.LAST, 20),
    ):  # fmt: skip
        engine.add_prefill(embed(name, ids, pooling), hold=False)
        outputs = run(engine)[name]
        assert outputs[0].num_cached_tokens == hit
        check(outputs[-1], expected(reference, ids, pooling))
    engine.add_prefill(embed("salted", ids, Pooling.LAST, salt="other"), hold=False)
    assert run(engine)["salted"][0].num_cached_tokens == 0


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_preempted_and_computed_again(pair: Any, pooling: Pooling) -> None:
    """A colocated worker takes its blocks away in the middle; nothing counts twice."""
    reference, model = pair
    engine = make_engine(model, num_kv_blocks=13, max_num_batched_tokens=4, max_num_seqs=4)
    engine.add(make_request("first", random_ids(8), max_tokens=30))
    while engine.num_running == 0 or engine.scheduler.running[0].is_prefilling:
        engine.step()
    ids = random_ids(33, seed=5)
    engine.add(embed("e", ids, pooling))
    outputs = run(engine)
    assert engine.stats().preemptions_total > 0
    check(outputs["e"][-1], expected(reference, ids, pooling))


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_an_abort_in_the_middle_frees_everything(pair: Any) -> None:
    _, model = pair
    engine = make_engine(model)
    engine.add_prefill(embed("e", random_ids(30), Pooling.MEAN), hold=False)
    engine.step()
    engine.abort("e")
    assert run(engine) == {}


def test_what_is_refused() -> None:
    engine = make_engine(MockModel())
    with pytest.raises(RequestError, match="gives no embeddings"):
        engine.add_prefill(embed("e", [1, 2], Pooling.MEAN), hold=False)
    sampling = SamplingParams(max_tokens=1, pooling=Pooling.MEAN)
    with pytest.raises(RequestError, match="max_tokens 0"):
        engine.add_prefill(GenerationRequest("e", (1,), sampling), hold=False)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_states_that_are_not_finite_are_an_error(pair: Any) -> None:
    _, model = pair
    engine = make_engine(model)

    class Broken(type(model)):  # type: ignore[misc]
        def hidden_states(self, *args: Any) -> torch.Tensor:
            return super().hidden_states(*args) * float("nan")

    engine.model = Broken.__new__(Broken)
    engine.model.__dict__ = model.__dict__
    engine.add_prefill(embed("e", random_ids(5), Pooling.LAST), hold=False)
    (output,) = engine.step()
    assert output.error == "the model's hidden states are not finite"
    engine.check_integrity()
