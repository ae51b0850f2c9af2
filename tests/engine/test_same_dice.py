"""The same request gives the same ids: in any batch, with any chunk size, on either side of a
hand-over, after preemptions, with the prefix cache cold or warm, guessed ahead or not."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.config import EngineConfig, SpeculativeConfig
from core.types import GenerationRequest
from engine.engine import Engine
from engine.model.decoder import Decoder
from engine.model.load import load_model
from support.mock_model import block_table_of, collect, make_request, run_to_end
from support.tiny_models import make_tiny, random_ids, save_tiny

B = 4
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    {"temperature": 1.2, "presence_penalty": 0.9, "repetition_penalty": 1.2},
]
LENGTHS = [1, B, 2 * B + 1, 23]
REQUESTS: dict[str, GenerationRequest] = {
    f"{length}-{index}": make_request(
        f"{length}-{index}", random_ids(length, seed=length), seed=7 * index, max_tokens=14, **kind
    )
    for length in LENGTHS
    for index, kind in enumerate(KINDS)
}
SPECULATIVE = [
    None,
    SpeculativeConfig(method="ngram", num_tokens=3, prompt_lookup_min=1),
    SpeculativeConfig(method="draft_model", model="d", num_tokens=3),
]


@dataclass(frozen=True)
class Models:
    target: Decoder
    peer: Decoder  # the same weights on another worker
    draft: Decoder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    target = save_tiny(make_tiny("qwen3"), tmp_path_factory.mktemp("target"))
    draft = save_tiny(make_tiny("llama", seed=3), tmp_path_factory.mktemp("draft"))
    return Models(*(load_model(files, "float32") for files in (target, target, draft)))


@pytest.fixture(scope="module")
def alone(models: Models) -> dict[str, list[int]]:
    """Each request by itself, its prompt in one piece."""
    engine = Engine(models.target, EngineConfig(block_size=B), 64)
    result = {}
    for name, request in REQUESTS.items():
        engine.add(request)
        result |= run_to_end(engine)
        assert len(result[name]) == 14
    return result


def hand_over(source: Engine, target: Engine, request: GenerationRequest) -> list[int]:
    """The first token, once the prompt's KV is on the other side."""
    name, first = request.request_id, {}
    source.add_prefill(request)
    while name not in source.scheduler.held:
        collect(first, source.step())
    target.add_remote(request)
    table = None
    while table is None:
        for output in target.step():
            collect(first, [output])  # others decode meanwhile
            if output.request_id == name and output.block_table is not None:
                table, num_cached = output.block_table, output.num_cached_tokens
    rows = slice(num_cached // B, None)
    target.kv_cache[table[rows]] = source.kv_cache[block_table_of(source, name)[rows]]
    source.release(name)
    target.start_decode(name, first[name][0])
    return first


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    names=st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=6, unique=True),
    gaps=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    handed_over=st.sets(st.integers(0, 5), max_size=3),
    budget=st.sampled_from([1, B, 7, 16, 64]),
    num_blocks=st.sampled_from([12, 16, 64]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    caches=st.booleans(),
    speculative=st.sampled_from(SPECULATIVE),
)
def test_same_ids_in_any_company(
    models: Models,
    alone: dict[str, list[int]],
    names: list[str],
    gaps: list[int],
    handed_over: set[int],
    budget: int,
    num_blocks: int,
    max_num_seqs: int,
    caches: bool,
    speculative: SpeculativeConfig | None,
) -> None:
    config = EngineConfig(
        block_size=B,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caches,
        speculative=speculative,
    )
    engine = Engine(models.target, config, num_blocks, draft=models.draft)
    peer = Engine(models.peer, EngineConfig(block_size=B, max_num_batched_tokens=5), 64)
    tokens: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if index in handed_over:
            for other, more in hand_over(peer, engine, REQUESTS[name]).items():
                tokens.setdefault(other, []).extend(more)
        else:
            engine.add(REQUESTS[name])
        for _ in range(gaps[index]):
            collect(tokens, engine.step())
            engine.check_integrity()
    for name, more in run_to_end(engine).items():
        tokens.setdefault(name, []).extend(more)
    assert tokens == {name: alone[name] for name in names}
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total


def test_same_ids_after_preemptions(models: Models, alone: dict[str, list[int]]) -> None:
    """V29: in a pool where nobody can stay, and in the reverse order."""
    for order in (sorted(REQUESTS), sorted(REQUESTS, reverse=True)):
        config = EngineConfig(block_size=B, max_num_batched_tokens=24)
        engine = Engine(models.target, config, 14)
        for name in order:
            engine.add(REQUESTS[name])
        assert run_to_end(engine) == alone
        assert engine.stats().preemptions_total > 0
