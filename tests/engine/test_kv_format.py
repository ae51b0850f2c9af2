"""Quantised KV: what a row holds, what attention over it loses, and that a hit equals a miss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import IncompatiblePeerError
from engine.attention.kv_format import KVFormat
from engine.model.decoder import Decoder
from engine.model.load import load_model
from kv_transfer.compatibility import check
from router.text.tokenizer import load_tokenizer
from support.models import smollm2_files
from support.models_check import pull
from support.tiny_models import PagedRunner, make_tiny, random_ids, save_tiny

TEXT = Path(__file__).parents[1] / "data" / "moby_dick.txt"
# (largest relative error of a row's number, largest mean KL of a tiny model's logits)
BOUNDS = {"int8": (0.5 / 127, 1e-3), "fp8_e4m3": (1 / 16, 0.02), "bf16": (1 / 256, 1e-3)}
QUANTISED = ["int8", "fp8_e4m3"]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e5])
@pytest.mark.parametrize("padding", [0, 12])
def test_a_row_comes_back_within_its_bound(name: Any, size: float, padding: int) -> None:
    kv_format = KVFormat(name, torch.float32, padding)
    x = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0)) * size
    x[..., 5] *= 20  # an outlier channel, as keys have
    rows = kv_format.encode(x)
    assert rows.dtype == kv_format.storage_dtype
    assert rows.shape == (7, 3, kv_format.row_size(16))
    assert kv_format.head_dim(rows.shape[-1]) == 16
    back = kv_format.decode(rows)
    assert back.dtype == torch.float32
    error = (back - x).abs() / x.abs().amax(-1, keepdim=True)
    assert 0 < error.max() <= BOUNDS[name][0] * 1.001


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_are_exact_and_a_row_depends_on_itself_alone(name: Any) -> None:
    kv_format = KVFormat(name, torch.bfloat16)
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1] = 0
    rows = kv_format.encode(x)
    assert torch.equal(kv_format.decode(rows)[1], x[1])
    assert torch.equal(kv_format.encode(x[2:3]), rows[2:3])
    untouched = torch.zeros(2, kv_format.row_size(8), dtype=torch.uint8)
    assert torch.equal(kv_format.decode(untouched), torch.zeros(2, 8).bfloat16())


def test_auto_keeps_the_models_type() -> None:
    x = torch.randn(4, 2, 8)
    kv_format = KVFormat("auto", torch.float32)
    assert kv_format.storage_dtype == torch.float32
    assert kv_format.encode(x) is x and kv_format.decode(x) is x


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_model_keeps_its_distributions(tmp_path: Path, family: str, name: Any) -> None:
    files = save_tiny(make_tiny(family), tmp_path)
    ids = random_ids(60)
    plain, ours = (
        PagedRunner(load_model(files, "float32", kv_cache_dtype=kind))
        .chunks(ids, [1, 20, 19])  # the last twenty decode
        .log_softmax(-1)
        for kind in ("auto", name)
    )
    kl = (plain.exp() * (plain - ours)).sum(-1).mean()
    assert 0 < kl < BOUNDS[name][1]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("family", ["qwen2", "deepseek-v3"])
def test_chunks_and_prefix_hits_equal_one_whole_prompt(
    tmp_path: Path, family: str, name: Any
) -> None:
    """A prompt reads its own keys as the cache holds them, so nothing depends on the chunks."""
    model = load_model(save_tiny(make_tiny(family), tmp_path), "float32", kv_cache_dtype=name)
    runner = PagedRunner(model)
    ids = random_ids(30)
    whole = runner.chunks(ids, [30])
    torch.testing.assert_close(runner.chunks(ids, [7, 9, 1, 8]), whole, atol=2e-3, rtol=1e-3)
    runner.step({"first": ids[:16]})
    runner.block_tables["hit"] = list(runner.block_tables["first"])
    runner.lengths["hit"] = 12
    hit = runner.step({"hit": ids[12:16]})
    torch.testing.assert_close(hit, whole[12:16], atol=2e-3, rtol=1e-3)


def test_workers_with_another_format_refuse_each_other(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    int8, fp8 = (
        load_model(files, "float32", kv_cache_dtype=kind).compatibility()
        for kind in ("int8", "fp8_e4m3")
    )
    with pytest.raises(IncompatiblePeerError, match=r"kv_format \(ours int8, theirs fp8_e4m3\)"):
        check(int8, fp8)


def read(model: Decoder, ids: list[int]) -> tuple[PagedRunner, torch.Tensor]:
    """Log probabilities, read in chunks of 32, so that nearly all KV comes from the cache."""
    runner = PagedRunner(model, num_blocks=-(-len(ids) // 16), block_size=16)
    return runner, runner.chunks(ids, [32] * (len(ids) // 32)).log_softmax(-1)


def test_int8_kv_changes_a_real_models_perplexity_by_less_than_one_percent() -> None:
    """V71: before and after a hand-over, to which the scales go with their rows."""
    files = smollm2_files()
    ids = load_tokenizer(files).encode(TEXT.read_text(encoding="utf-8"))[:256]
    right = torch.tensor(ids[1:]).unsqueeze(1)
    plain = read(load_model(files, "bfloat16", kv_cache_dtype="bf16"), ids)[1]
    model = load_model(files, "bfloat16", kv_cache_dtype="int8")
    runner, ours = read(model, ids)
    taker = PagedRunner(model, num_blocks=16, block_size=16)
    pull(runner, taker, "seq0", 128)
    rest = [taker.step({"seq0": ids[at : at + 32]}) for at in range(128, 256, 32)]
    handed = torch.cat((ours[:128], torch.cat(rest).log_softmax(-1)))
    before, after, there = (
        p[:-1].gather(1, right).mean().neg().exp() for p in (plain, ours, handed)
    )
    assert before < 120  # an old text, without its beginning-of-text token
    assert abs(after / before - 1) < 0.01 and abs(there / before - 1) < 0.01
    assert (plain.exp() * (plain - ours)).sum(-1).mean() < 0.01
    torch.testing.assert_close(handed, ours)
