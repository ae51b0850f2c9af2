"""The whole engine over real layers of several kinds: random work through a small pool gives what
transformers gives, greedily and in float32."""

import random
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, SpeculativeConfig
from engine.engine import Engine
from engine.model.load import load_model
from support.mock_model import make_request, run_to_end
from support.ranks import sharded
from support.tiny_models import PagedRunner, make_tiny, random_ids, reference_logits, save_tiny

BLOCK = 4


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "deepseek-v2"])
@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(method="ngram", num_tokens=3)])
def test_warm_equals_cold_under_pressure(
    tmp_path: Path, family: str, speculative: SpeculativeConfig | None
) -> None:
    """V65: every prompt twice and prefixes of others, wholly cached or not, with preemptions and
    evictions between; V67: in chunks of any size; V72: with guesses too."""
    reference = make_tiny(family)
    config = EngineConfig(block_size=BLOCK, max_num_batched_tokens=11, speculative=speculative)
    engine = Engine(load_model(save_tiny(reference, tmp_path), "float32"), config, 20)
    rng = random.Random(family)
    longest = random_ids(21, seed=7)
    prompts = [longest[: rng.choice((3, 4, 5, 8, 12, 16, 17, 21))] for _ in range(8)]
    prompts += [random_ids(rng.randrange(1, 22), seed=seed) for seed in range(4)]
    requests = {f"r{i}": prompt for i, prompt in enumerate(prompts * 2)}
    names = list(requests)
    rng.shuffle(names)
    for name in names:
        engine.add(make_request(name, requests[name], max_tokens=9))
    outputs = run_to_end(engine)
    stats = engine.stats()
    assert stats.preemptions_total > 0 and stats.prefix_hit_tokens_total > 0
    for prompt in prompts:
        (output,) = {tuple(outputs[name]) for name in names if requests[name] == prompt}
        expected = reference_logits(reference, [*prompt, *output]).argmax(-1)
        assert list(output) == expected[len(prompt) - 1 : -1].tolist()
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize("family", ["qwen2", "deepseek-v3"])
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_quantised_kv_does_not_depend_on_the_ranks(tmp_path: Path, family: str, kind: Any) -> None:
    """V71: every row has its own scale, so that cutting the heads changes rounding alone."""
    files = save_tiny(make_tiny(family), tmp_path)
    ids = random_ids(40)
    options: Any = {"dtype": "float32", "kv_cache_dtype": kind}
    whole = PagedRunner(load_model(files, **options)).chunks(ids, [9, 20])
    with sharded(files, 2, 96, BLOCK, **options) as model:
        cut = PagedRunner(model, block_size=BLOCK).chunks(ids, [9, 20])
    # A number on the edge between two stored ones may fall to either side.
    kl = (whole.softmax(-1) * (whole.log_softmax(-1) - cut.log_softmax(-1))).sum(-1)
    assert kl.max() < 1e-3
