"""Checkpoints with weights in 8-bit floats and a scale for every block of them, as DeepSeek-V3 and
Qwen3's FP8 models are published. They are widened as they are read: nothing is computed in fp8.

    weight[i, j] = stored[i, j] * weight_scale_inv[i // block_rows, j // block_columns]
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from core.errors import ModelError
from engine.model.weights import SafetensorsSource

_SCALE = "_scale_inv"


def is_block_fp8(config: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` says so; any other kind is refused with the config."""
    quantization = config.get("quantization_config") or {}
    return quantization.get("quant_method") == "fp8" and bool(quantization.get("weight_block_size"))


class BlockFp8Source(SafetensorsSource):
    """Looks like the checkpoint that was quantised. Holds the scales while it is read: a number
    for each block."""

    is_mapped = False  # most are copies

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        super().__init__(path, {k: v for k, v in config.items() if k != "quantization_config"})
        rows, columns = quantization["weight_block_size"]
        self._block = (int(rows), int(columns))
        self._scale_names = {name for name in self.shapes if name.endswith(_SCALE)}
        for name in self._scale_names:
            weight = name.removesuffix(_SCALE)
            shape, found = self.shapes.get(weight), self.shapes.pop(name)
            if shape is None:
                raise ModelError(f"checkpoint: {name} has no tensor {weight}")
            expected = tuple(-(-n // b) for n, b in zip(shape, self._block, strict=False))
            if found != expected:
                raise ModelError(
                    f"tensor {name} has shape {list(found)}, expected {list(expected)}"
                )

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        scales = self._scales(self._scale_names)
        for name, tensor in super().read(dtype):
            if name in self._scale_names:
                continue
            scale = scales.pop(f"{name}{_SCALE}", None)
            if tensor.dtype != torch.float8_e4m3fn:
                yield name, tensor
            elif scale is None:
                raise ModelError(f"checkpoint: 1 tensor is missing: {name}{_SCALE}")
            else:
                yield name, widened(tensor, scale, self._block, dtype)

    def sample(self, name: str) -> bytes:
        described = super().sample(name)
        if f"{name}{_SCALE}" in self._scale_names:
            (scale,) = self._scales({f"{name}{_SCALE}"}).values()
            described += scale.float().flatten()[:64].numpy().tobytes()
        return described

    def _scales(self, names: set[str]) -> dict[str, torch.Tensor]:
        scales: dict[str, torch.Tensor] = {}
        for file in {self._files[name] for name in names}:
            with safe_open(file, framework="pt") as handle:
                own = [name for name in names if self._files[name] == file]
                scales |= {name: handle.get_tensor(name).clone() for name in own}
        return scales


def widened(
    stored: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """float8 `[rows, columns]` and a scale a block. One row of blocks at a time."""
    out = torch.empty(stored.shape, dtype=dtype)
    columns = stored.shape[1]
    for i, start in enumerate(range(0, stored.shape[0], block[0])):
        by_column = scales[i].float().repeat_interleave(block[1])[:columns]
        rows = slice(start, start + block[0])
        out[rows] = stored[rows].float().mul_(by_column)
    return out
