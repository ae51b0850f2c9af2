"""Weight-only quantisation: what is stored, what both kernels and the wide path compute from it,
and what a model loses by it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import native
from engine.model import quantised as module
from engine.model.layers import Linear
from engine.model.load import load_model
from engine.model.quantised import INT4_GROUP, Int4Linear, Int8Linear, quantised
from kv_transfer.compatibility import check
from support.tiny_models import (
    PagedRunner,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

SHAPES = [(64, 32), (192, 96), (128, 576)]
DTYPES = [torch.float32, torch.bfloat16]


def random_linear(shape: tuple[int, int], dtype: torch.dtype, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(0)
    # Channels of very different sizes, as in real models.
    sizes = torch.rand(shape[0], 1, generator=generator) * 3
    weight = torch.randn(shape, generator=generator) * sizes
    made = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    return Linear(weight.to(dtype), made)


def dequantised(linear: Int8Linear | Int4Linear) -> torch.Tensor:
    if isinstance(linear, Int8Linear):
        return linear.values.to(linear.scales.dtype) * linear.scales.unsqueeze(1)
    return linear._transposed().t()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_within_half_a_step_of_its_channel(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = random_linear(shape, dtype)
    weight = linear.weight.float()
    with native.turned_off():
        made = quantised(linear, "int8")
    assert isinstance(made, Int8Linear)
    step = made.scales.float().unsqueeze(1)
    error = (made.values.float() * step - weight).abs()
    # A scale that was rounded down to bfloat16 may clip the largest by 1/256 of it: half a step.
    assert (error <= step * (0.5001 if dtype == torch.float32 else 1.01)).all()
    assert (step <= weight.abs().amax(1, keepdim=True) / 127 * 1.01).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_within_half_a_step_of_its_group(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = random_linear(shape, dtype)
    with native.turned_off():
        made = quantised(linear, "int4")
    assert isinstance(made, Int4Linear)
    groups = linear.weight.float().unflatten(1, (-1, INT4_GROUP))
    step = (groups.amax(-1) - groups.amin(-1)).unsqueeze(-1) / 15
    error = (dequantised(made).float().unflatten(1, (-1, INT4_GROUP)) - groups).abs()
    if dtype == torch.float32:
        assert (error <= step * 0.5001).all()
    else:  # rounded midpoints and products: 1/256 of the numbers themselves
        assert (error <= step * 0.6 + groups.abs().amax(-1, keepdim=True) / 100).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40])
@pytest.mark.parametrize("has_native", [False, True])
def test_few_and_many_rows_compute_the_product_of_the_stored_weight(
    kind: Any, dtype: torch.dtype, rows: int, has_native: bool
) -> None:
    linear = random_linear((192, 96), dtype, bias=True)
    with native.turned_off():
        stored: Any = quantised(linear, kind)
    made: Any = quantised(linear, kind) if has_native else stored
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(1)).to(dtype)[:, ::2]
    assert linear.bias is not None
    expected = x.float() @ dequantised(stored).float().t() + linear.bias.float()
    tolerance = 1e-3 if dtype == torch.float32 else 0.02 * float(expected.abs().max())
    out = made(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("num_inputs", [4, 24, 40, 72, 90])
def test_int8_reads_its_own_numbers_and_no_other(num_inputs: int) -> None:
    """torch's kernel took what lies behind a row for inputs that 16 does not divide."""
    made = quantised(random_linear((40, num_inputs), torch.bfloat16), "int8")
    assert isinstance(made, Int8Linear)
    memory = torch.full((2 * num_inputs + 64,), torch.nan, dtype=torch.bfloat16)
    x = memory[: 2 * num_inputs].view(2, num_inputs).normal_()
    expected = x.float() @ dequantised(made).float().t()
    tolerance = 0.02 * float(expected.abs().max())
    torch.testing.assert_close(made(x).float(), expected, atol=tolerance, rtol=0)


def test_without_the_kernel_int4_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = random_linear((128, 64), torch.float32)
    with_kernel: Any = quantised(linear, "int4")
    monkeypatch.setattr(module, "_has_int4_kernel", lambda dtype, device: False)
    without: Any = quantised(linear, "int4")
    assert not without.has_kernel
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(without(x), with_kernel(x), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [(96, 64), (64, 48)])
def test_a_shape_that_int4_does_not_divide_becomes_int8(shape: tuple[int, int]) -> None:
    with native.turned_off():
        made = quantised(random_linear(shape, torch.float32), "int4")
    assert isinstance(made, Int8Linear)


def test_a_channel_of_zeros_stays_zero() -> None:
    zeros = Linear(torch.zeros(64, 64))
    x = torch.ones(2, 64)
    for kind in ("int8", "int4"):
        made: Any = quantised(zeros, kind)
        assert made(x).abs().max() < 1e-6


@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "qwen3-moe", "phi3"])
@pytest.mark.parametrize(("kind", "largest_kl"), [("int8", 5e-3), ("int4", 0.3)])
def test_a_model_keeps_its_distributions(
    tmp_path: Path, family: str, kind: Any, largest_kl: float
) -> None:
    reference = make_tiny(family)
    files = save_tiny(reference, tmp_path)
    ids = random_ids(40)
    model = load_model(files, "float32", quantization=kind)
    ours = PagedRunner(model).chunks(ids, [30, 4]).log_softmax(-1)
    theirs = reference_logits(reference, ids).log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert 0 < kl < largest_kl


def test_workers_with_other_weights_refuse_each_other(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    maps = {
        kind: load_model(files, "float32", quantization=kind).compatibility()
        for kind in ("none", "int8", "int4")
    }
    check(maps["int8"], load_model(files, "float32", quantization="int8").compatibility())
    for ours, theirs in [("none", "int8"), ("int8", "int4"), ("none", "int4")]:
        with pytest.raises(Exception, match=rf"quantization \(ours {ours}, theirs {theirs}\)"):
            check(maps[ours], maps[theirs])
