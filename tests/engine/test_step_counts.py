"""The counts that make a step fast. Nothing here is timed: a torch call costs microseconds, and
what matters is that their number does not grow with the sequences of a batch."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.config import EngineConfig
from core.types import GenerationRequest, SamplingParams
from engine import native, sampler
from engine.engine import Engine
from engine.model.load import load_model
from support.tiny_models import make_tiny, random_ids, save_tiny

LAYERS = 3
# Calls that make no tensor with memory of its own.
VIEWS = {
    "view", "_unsafe_view", "slice", "select", "expand", "transpose", "permute", "t", "alias",
    "unsqueeze", "squeeze", "as_strided", "detach", "split", "unbind", "chunk", "_reshape_alias",
}  # fmt: skip


class CallCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(path: Path, dtype: str, batch: int, num_layers: int = LAYERS) -> Counter[str]:
    """Of one greedy decode step of `batch` sequences of the same length."""
    shape = {"head_dim": 32, "intermediate_size": 128, "num_hidden_layers": num_layers}
    folder = path / f"{dtype}-{batch}-{num_layers}"
    folder.mkdir()
    files = save_tiny(make_tiny("llama", **shape), folder)
    engine = Engine(load_model(files, dtype), EngineConfig(block_size=4), 128)
    for i in range(batch):
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        engine.add(GenerationRequest(f"{i}", tuple(random_ids(10, seed=i)), sampling))
    while engine.stats().waiting_prefill_tokens:
        engine.step()
    engine.step()
    with CallCounter() as counter:
        outputs = engine.step()
    assert len(outputs) == batch and all(len(o.token_ids) == 1 for o in outputs)
    return counter.calls


def allocations(calls: Counter[str]) -> int:
    return sum(count for name, count in calls.items() if name not in VIEWS)


def test_a_step_makes_as_many_calls_for_16_sequences_as_for_2(tmp_path: Path) -> None:
    few, many = (calls_of_a_step(tmp_path, "float32", batch) for batch in (2, 16))
    assert few == many


def test_calls_of_a_layer(tmp_path: Path) -> None:
    three = calls_of_a_step(tmp_path, "float32", 4)
    four = calls_of_a_step(tmp_path, "float32", 4, num_layers=LAYERS + 1)
    # 4 products, 2 norms, rope, cache, attention, activation and sums; views not counted.
    assert allocations(four) - allocations(three) <= 28


@pytest.mark.skipif(native.library() is None, reason="no compiler or no AVX512-BF16")
def test_a_native_step_makes_no_call_for_a_layer(tmp_path: Path) -> None:
    three = calls_of_a_step(tmp_path, "bfloat16", 4)
    four = calls_of_a_step(tmp_path, "bfloat16", 4, num_layers=LAYERS + 1)
    assert three == four
    # Inputs, embedding, cos and sin, logits, the sampled ids and whether they are finite.
    assert allocations(three) <= 24
    assert calls_of_a_step(tmp_path, "bfloat16", 16) == three


@pytest.mark.skipif(native.library() is None, reason="no compiler or no AVX512-BF16")
def test_nobody_reads_all_logits_again_for_the_greatest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where they have been changed since, as by a bias."""
    searched, search = 0, sampler._maxima

    def counted(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal searched
        searched += 1
        return search(logits)

    monkeypatch.setattr(sampler, "_maxima", counted)
    shape = {"head_dim": 32, "intermediate_size": 128}
    files = save_tiny(make_tiny("llama", **shape), tmp_path)
    engine = Engine(load_model(files, "bfloat16"), EngineConfig(block_size=4), 128)

    def tokens(**sampling: Any) -> list[int]:
        params = SamplingParams(max_tokens=4, **sampling)
        engine.add(GenerationRequest("a", tuple(random_ids(10)), params))
        found: list[int] = []
        while engine.has_work():
            found += [token for output in engine.step() for token in output.token_ids]
        return found

    greedy = tokens(temperature=0.0)
    assert tokens(temperature=1e-6) == greedy and searched == 0
    assert tokens(temperature=0.0, logit_bias={greedy[0]: -100.0})[0] != greedy[0]
    assert searched == 4
