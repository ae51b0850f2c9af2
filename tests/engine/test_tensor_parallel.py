"""Models cut among ranks against the whole ones, in float32, on tiny random weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.errors import ModelError, RankLostError
from core.types import GenerationRequest, Pooling, SamplingParams
from engine.attention.base import StepBatch
from engine.engine import Engine
from engine.model.load import load_model
from engine.model.sharding import Shard, joined
from engine.parallel import RankGroup, StepKind, TensorParallel, decode_step, encode_step
from support.ranks import make_groups, sharded
from support.tiny_models import (
    PagedRunner,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
    write_gguf,
)

VOCAB = 126  # 4 ranks pad it
# Every kind of cut: biases, fused and tied weights, norms of heads, experts; KV heads fewer than
# the 4 ranks, and as many.
CASES = [
    (2, "llama-biases", {}),
    (2, "gemma2", {}),
    (2, "phi3", {}),
    (2, "qwen3-moe", {}),
    (
        4,
        "llama",  # features that no group of 32 divides
        {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 90},
    ),
    (4, "llama-biases", {}),
    (4, "qwen3", {}),
    (4, "phi3-partial", {}),
    (4, "mixtral", {}),
    (2, "deepseek-v2", {}),
    (4, "deepseek-v3", {}),
]


def ids_of(length: int, seed: int = 0) -> list[int]:
    return [token % VOCAB for token in random_ids(length, seed)]


@pytest.mark.parametrize(("size", "family", "changes"), CASES)
def test_logits_equal_transformers(
    size: int, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_tiny(family, vocab_size=VOCAB, **changes)
    files = save_tiny(reference, tmp_path)
    ids = ids_of(30)
    with sharded(files, size, 96, 4, dtype="float32") as model:
        logits = PagedRunner(model).chunks(ids, [1, 7, 4, 5, 8])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=2e-4, rtol=1e-4)


def test_a_gguf_file_is_cut_alike(tmp_path: Path) -> None:
    reference = make_tiny("mixtral")
    files = write_gguf(reference, tmp_path / "tiny.gguf")
    ids = random_ids(20)
    with sharded(files, 2, 96, 4, dtype="float32") as model:
        logits = PagedRunner(model).chunks(ids, [9])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_engine_says_the_same_with_and_without_ranks(
    kv_cache_dtype: Any, tmp_path: Path
) -> None:
    """Chunks, a prefix hit, a preemption, guesses and sampling: followers know nothing of them."""
    files = save_tiny(make_tiny("qwen2", vocab_size=VOCAB), tmp_path)
    options = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    alone = _outputs(load_model(files, **options))
    with sharded(files, 2, _BLOCKS, _BLOCK, **options) as model:
        assert _outputs(model) == alone


@pytest.mark.parametrize("pooling", list(Pooling))
def test_embeddings_beside_text(pooling: Pooling, tmp_path: Path) -> None:
    reference = make_tiny("gemma2")
    files = save_tiny(reference, tmp_path)
    ids = random_ids(19)
    with torch.inference_mode():
        states = reference.model(torch.tensor([ids])).last_hidden_state[0]
    wanted = states.mean(0) if pooling is Pooling.MEAN else states[-1]
    with sharded(files, 2, 32, 4, dtype="float32") as model:
        config = EngineConfig(block_size=4, max_num_batched_tokens=8)
        engine = Engine(model, config, 32)
        text = SamplingParams(max_tokens=9, temperature=0.0)
        engine.add(GenerationRequest("text", tuple(ids[:5]), text))
        only = SamplingParams(max_tokens=0, pooling=pooling)
        engine.add_prefill(GenerationRequest("e", tuple(ids), only), hold=False)
        said, embedding = [], b""
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                said += output.token_ids
                embedding = embedding or output.embedding
    found = torch.frombuffer(bytearray(embedding), dtype=torch.float32)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    logits = reference_logits(reference, [*ids[:5], *said])
    assert said == logits[4:-1].argmax(-1).tolist() and len(said) == 9


_BLOCKS, _BLOCK = 20, 4


def _outputs(model: Any) -> dict[str, list[int]]:
    config = EngineConfig.model_validate(
        {
            "block_size": _BLOCK,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "speculative": {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1},
        }
    )
    engine = Engine(model, config, _BLOCKS)
    shared = ids_of(13)
    outputs: dict[str, list[int]] = {}
    for wave in range(2):  # the second finds the first one's prefix
        for i in range(3):
            sampling = SamplingParams(max_tokens=16, temperature=0.8 * (i == 2), seed=i)
            name = f"{wave}.{i}"
            prompt = (*shared, *ids_of(5 + i, seed=i))
            engine.add(GenerationRequest(name, prompt, sampling=sampling))
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check_integrity()
    stats = engine.stats()
    assert stats.prefix_hit_tokens_total > 0 and stats.preemptions_total > 0
    assert stats.tokens_drafted_total > 0
    return outputs


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_after_the_cut(quantization: Any, tmp_path: Path) -> None:
    """As near to the plain model as the whole one quantised: int4's groups stay whole."""
    reference = make_tiny("llama", hidden_size=128, intermediate_size=256, head_dim=32)
    files = save_tiny(reference, tmp_path)
    ids = random_ids(24)
    options = {"dtype": "float32", "quantization": quantization}
    expected = reference_logits(reference, ids)
    whole = PagedRunner(load_model(files, **options)).chunks(ids, [20]) - expected
    with sharded(files, 2, 96, 4, **options) as model:
        cut = PagedRunner(model).chunks(ids, [20]) - expected
    assert 0 < cut.square().mean() < 1.2 * whole.square().mean()
    if quantization == "int4":  # scales of int8 span a row of o and down, which a cut makes two
        torch.testing.assert_close(cut[:3], whole[:3], atol=0.05, rtol=0)


# ---------------------------------------------------------------- what a rank holds


def test_each_rank_has_its_part_of_heads_and_features() -> None:
    shards = [Shard(rank, 4) for rank in range(4)]
    assert [s.heads(8, 16).ranges[0] for s in shards] == [
        slice(start, start + 32) for start in (0, 32, 64, 96)
    ]
    # Two KV heads: ranks 0 and 1 have the first one, as their query heads do.
    assert [s.heads(2, 16).ranges[0].start for s in shards] == [0, 0, 16, 16]
    # 160 features are 5 groups of 32; 90 are cut anywhere.
    assert [s.features(160).num_own for s in shards] == [32, 32, 32, 64]
    assert sum(s.features(90).num_own for s in shards) == 90
    assert [(s.vocabulary(9).num_own, s.vocabulary(9).padding) for s in shards] == [
        (3, 0), (3, 0), (3, 0), (3, 3),
    ]  # fmt: skip
    fused = joined(shards[1].heads(8, 16), shards[1].heads(2, 16), shards[1].heads(2, 16))
    assert fused.ranges == (slice(32, 64), slice(128, 144), slice(160, 176))
    assert fused.size == 192


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "tensor_parallel_size 3 does not divide num_attention_heads 4"),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "tensor_parallel_size 4 and num_key_value_heads 6: expected that one divides",
        ),
        ({"intermediate_size": 3}, 4, "an MLP of 3 features has too few"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    changes: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    files = save_tiny(make_tiny("llama", **changes), tmp_path)

    class Alone:
        rank = 0

    Alone.size = size  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=message):
        load_model(files, "float32", ranks=Alone())  # type: ignore[arg-type]


# ---------------------------------------------------------------- what passes between ranks


@pytest.fixture
def groups() -> Any:
    with ThreadPoolExecutor(2) as pool:
        made = make_groups(2, pool)
        yield made, pool
        for group in made:
            group.close()


@pytest.mark.parametrize("num_blocks", [3, 2000])
def test_a_step_arrives_as_it_was_sent(groups: Any, num_blocks: int) -> None:
    """Short ones take one message, longer ones two."""
    (leader, follower), pool = groups
    tables = [list(range(5, 5 + num_blocks)), [7]]
    batch = StepBatch([1, 3], [4 * num_blocks, 3], tables, 1)
    received = pool.submit(follower.receive)
    leader.send(encode_step(StepKind.FORWARD, batch, [9, 8, 7, 6], [0, 3]))
    message = received.result(timeout=20)
    assert message[0] == StepKind.FORWARD
    assert decode_step(message) == (batch, [9, 8, 7, 6], [0, 3])


def test_the_least_of_all_ranks(groups: Any) -> None:
    made, pool = groups
    assert list(pool.map(RankGroup.least, made, (70, 64))) == [64, 64]


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_step_ends_at_rank_0_when_all_have_written_their_kv(groups: Any, num_rows: int) -> None:
    """Also one whose logits nobody asked for: its blocks are announced to others at once."""
    (leader, follower), pool = groups
    own = torch.ones(num_rows, 3)
    gathered = pool.submit(leader.gather, own)
    with pytest.raises(TimeoutError):
        gathered.result(timeout=0.1)
    assert follower.gather(2 * own) is None
    expected = torch.tensor([[1.0, 1, 1, 2, 2, 2]]).expand(num_rows, 6)
    assert torch.equal(gathered.result(timeout=20), expected)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_wait_of_another(groups: Any, lost: int) -> None:
    """A process that dies closes its sockets, as a group does that is left."""
    made, pool = groups
    other = made[1 - lost]
    wait = other.receive if lost == 0 else lambda: other.all_reduce(torch.ones(3))
    waiting = pool.submit(wait)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.1)
    made[lost].close()
    with pytest.raises(RankLostError, match=f"rank {1 - lost} of 2 has lost another one"):
        waiting.result(timeout=20)


def test_an_engine_without_all_its_ranks_ends(tmp_path: Path) -> None:
    """Its requests cannot go on elsewhere in the process, so no step may follow."""
    model = load_model(save_tiny(make_tiny("llama"), tmp_path), "float32")

    class Gone:
        def send(self, message: list[int]) -> None:
            raise RankLostError("rank 0 of 2 has lost another one")

    engine = Engine(TensorParallel(model, Gone()), EngineConfig(), 8)  # type: ignore[arg-type]
    engine.add(GenerationRequest("a", (1, 2, 3), sampling=SamplingParams(max_tokens=2)))
    with pytest.raises(RankLostError):
        engine.step()
