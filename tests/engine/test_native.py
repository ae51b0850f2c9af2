"""The compiled operations against torch's, and everything without them."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine import native
from engine.attention.base import AttentionLayer, StepBatch
from engine.attention.torch_paged import TorchPagedAttention
from engine.model.layers import Linear, Norm, can_pack, packed
from engine.model.load import load_model
from support.tiny_models import PagedRunner, make_tiny, random_ids, save_tiny

needs_native = pytest.mark.skipif(native.library() is None, reason="no compiler or no AVX512-BF16")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_native
@pytest.mark.parametrize("rows", [1, 3, 4, 7, native.MAX_ROWS, native.MAX_ROWS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 2), (192, 96), (960, 576)])
def test_linear_equals_torch(shape: tuple[int, int], has_bias: bool, rows: int) -> None:
    linear = Linear(randn(*shape), randn(shape[0], seed=1) if has_bias else None)
    x = randn(rows, 2 * shape[1], seed=2)[:, ::2]
    expected = F.linear(
        x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float()
    )
    out = packed(linear)(x)
    assert out.dtype == torch.bfloat16
    # One rounding to bfloat16 at the end.
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2**-8)


@needs_native
def test_real_shapes_take_the_native_product() -> None:
    assert packed(Linear(randn(960, 576))).tiles is not None


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no bfloat16")
def test_a_shape_that_tiles_do_not_divide_is_left_to_torch() -> None:
    made = packed(Linear(randn(100, 64)))
    assert made.tiles is None
    x = randn(2, 64, seed=1)
    torch.testing.assert_close(
        made(x).float(), x.float() @ randn(100, 64).float().t(), atol=2e-2, rtol=2**-7
    )


@needs_native
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 4, 16)])
def test_norm_equals_torch(shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape) * 30, randn(shape[-1], seed=1)
    assert native.can_norm(x, weight)
    expected = F.rms_norm(x.float(), weight.shape, weight.float(), 1e-5)
    out = Norm(weight, 1e-5)(x)
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=2**-8)


@needs_native
def test_norm_leaves_to_torch_what_is_no_plain_row() -> None:
    weight = randn(16)
    assert not native.can_norm(randn(4, 32)[:, ::2], weight)
    assert not native.can_norm(randn(4, 16).float(), weight)
    assert not native.can_norm(randn(4, 8), randn(8))


def test_without_it_a_model_gives_the_same_logits(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    ids = random_ids(20)
    ours = PagedRunner(load_model(files, "bfloat16")).chunks(ids, [12])
    with native.turned_off():
        torchs = PagedRunner(load_model(files, "bfloat16")).chunks(ids, [12])
    torch.testing.assert_close(ours, torchs, atol=0.1, rtol=0.02)


def test_a_broken_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert native._library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_NATIVE", "0")
    assert native._library.__wrapped__() is None


@needs_native
@pytest.mark.parametrize("lens", [[1], [4], [250, 3, 17, 1], [5, 5, 5]])
@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (4, 4, 64), (9, 3, 64)])
def test_decode_attention_equals_torchs(
    lens: list[int],
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    size = 4
    counts = [-(-n // size) for n in lens]
    ids = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    cache = randn(sum(counts) + 3, 3, 2, kv_heads, size, dim)
    batch = StepBatch([1] * len(lens), lens, tables, len(lens))
    both = randn(len(lens), heads + kv_heads, dim, seed=1)  # query and key are views of one
    value = randn(len(lens), kv_heads, dim, seed=2)
    outs = []
    for how in (nullcontext(), native.turned_off()):
        with how:
            backend = TorchPagedAttention(cache.clone(), heads)
            backend.plan(batch)
            layer = AttentionLayer(1, 0.3, window)
            outs.append(backend.forward(layer, both[:, :heads], both[:, heads:], value))
    torch.testing.assert_close(outs[0].float(), outs[1].float(), atol=2e-2, rtol=2**-6)
