"""Checkpoints in fp8 with a scale a block, written as DeepSeek-V3 and Qwen3's are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.model_files import ModelFiles
from engine.model.load import fingerprint, load_model
from support.tiny_models import (
    PagedRunner,
    edit_config,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

BLOCK = (16, 24)  # divides few of the shapes
IDS = random_ids(20)
PLAIN = ("norm", "embed_tokens", "lm_head", "gate.weight", "bias")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored fp8, its scales, and what both together say."""
    rows, columns = BLOCK
    shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales, right = torch.empty(shape), torch.empty(weight.shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            right[at] = stored[at].float() * scales[i, j]
    return stored, scales, right


def save_fp8(family: str, folder: Path, shards: int = 1) -> tuple[Any, ModelFiles]:
    """(transformers model with the weights that the files mean, files)"""
    model = make_tiny(family)
    files = save_tiny(model, folder)
    right, stored = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        right[name] = stored[name] = tensor
        if tensor.ndim == 2 and not any(part in name for part in PLAIN):
            stored[name], stored[f"{name}_scale_inv"], right[name] = quantise(tensor)
    save_file(right, folder / "model.safetensors")
    reference = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    (folder / "model.safetensors").unlink()
    names = list(stored)
    for i in range(shards):  # a weight and its scales may be in different files
        part = {name: stored[name].contiguous() for name in names[i::shards]}
        save_file(part, folder / f"model-{i}.safetensors")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    edit_config(files, quantization_config=quantization)
    return reference, files


@pytest.mark.parametrize(
    ("family", "shards"), [("deepseek-v3", 1), ("deepseek-v3", 2), ("qwen3", 1)]
)
def test_logits_equal_those_of_the_widened_weights(
    tmp_path: Path, family: str, shards: int
) -> None:
    reference, files = save_fp8(family, tmp_path, shards)
    logits = PagedRunner(load_model(files, "float32")).chunks(IDS, [9])
    torch.testing.assert_close(logits, reference_logits(reference, IDS), atol=2e-4, rtol=1e-4)


def edit(files: ModelFiles, drop: str = "", **changes: torch.Tensor) -> None:
    path = files.path / "model-0.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file({**tensors, **changes}, path)


NAME = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("drop", "changes", "named"),
    [
        (f"{NAME}_scale_inv", {}, f"missing: {NAME}_scale_inv"),
        (NAME, {}, f"{NAME}_scale_inv has no tensor {NAME}"),
        ("", {f"{NAME}_scale_inv": torch.ones(1, 9)}, r"has shape .1, 9., expected .4, 4."),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, drop: str, changes: dict[str, torch.Tensor], named: str
) -> None:
    _, files = save_fp8("qwen3", tmp_path)
    edit(files, drop, **changes)
    with pytest.raises(ModelError, match=named):
        load_model(files)


def test_a_fingerprint_sees_the_scales(tmp_path: Path) -> None:
    _, files = save_fp8("qwen3", tmp_path)
    before = fingerprint(files)
    edit(files, **{f"{NAME}_scale_inv": torch.ones(4, 4)})
    assert fingerprint(files) != before


@pytest.mark.parametrize("quantization", [{"quant_method": "fp8"}, {"quant_method": "awq"}])
def test_other_quantised_checkpoints_are_refused(
    tmp_path: Path, quantization: dict[str, str]
) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    edit_config(files, quantization_config=quantization)
    with pytest.raises(ModelError, match=quantization["quant_method"]):
        load_model(files)
