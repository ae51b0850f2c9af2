"""How a token's key or value of one head is stored in the KV cache.

Quantised rows carry their own scale: `head_dim` bytes, then a float32, so that a block stays one
contiguous piece that needs nothing beside it when it is handed over, shared or reused.
"""

from dataclasses import dataclass
from typing import Literal

import torch

KVCacheDtype = Literal["auto", "bf16", "int8", "fp8_e4m3"]

_SCALE_BYTES = 4
PADDING_OF_16 = 12  # with it a row is a multiple of 16 bytes if the head dimension is
# (type of the stored bytes, the largest number that it holds)
_QUANTISED = {"int8": (torch.int8, 127.0), "fp8_e4m3": (torch.float8_e4m3fn, 448.0)}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`auto` stores what the model computes in. Encoding and decoding a row depends on that row
    alone: the same token gives the same bytes in any batch."""

    name: KVCacheDtype
    compute_dtype: torch.dtype
    padding: int = 0  # bytes behind a row's scale: a GPU's kernels load 16 bytes at once

    @property
    def storage_dtype(self) -> torch.dtype:
        if self.name in _QUANTISED:
            return torch.uint8
        return self.compute_dtype if self.name == "auto" else torch.bfloat16

    def row_size(self, head_dim: int) -> int:
        """Elements of the storage dtype in a row."""
        return head_dim + self._overhead

    def head_dim(self, row_size: int) -> int:
        return row_size - self._overhead

    @property
    def _overhead(self) -> int:
        return _SCALE_BYTES + self.padding if self.name in _QUANTISED else 0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., head_dim]` -> `[..., row_size]`"""
        if self.name not in _QUANTISED:
            return x.to(self.storage_dtype)
        dtype, largest = _QUANTISED[self.name]
        x = x.float()
        scales = x.abs().amax(dim=-1, keepdim=True).div_(largest).clamp_min_(1e-20)
        values = x / scales
        if dtype == torch.int8:
            values = values.round_()
        parts = [values.to(dtype).view(torch.uint8), scales.view(torch.uint8)]
        if self.padding:
            parts.append(parts[0].new_zeros(*x.shape[:-1], self.padding))
        return torch.cat(parts, dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., row_size]` -> `[..., head_dim]`"""
        if self.name not in _QUANTISED:
            return rows.to(self.compute_dtype)
        dtype, _ = _QUANTISED[self.name]
        values, scales = self.split(rows)
        if dtype == torch.int8:
            return (values * scales).to(self.compute_dtype)
        return (values.float() * scales).to(self.compute_dtype)

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised rows as views: values `[..., head_dim]`, float32 scales `[..., 1]`."""
        dtype, _ = _QUANTISED[self.name]
        at = self.head_dim(rows.shape[-1])
        scales = rows[..., at : at + _SCALE_BYTES].view(torch.float32)
        return rows[..., :at].view(dtype), scales


@dataclass(frozen=True, slots=True)
class LatentFormat:
    """A row of latent attention: the latent, then the key that all heads share, each stored as
    `part` says. Quantised ones have a scale each: one is normed, the other is not."""

    part: KVFormat
    latent_dim: int

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.part.compute_dtype

    def row_size(self, head_dim: int) -> int:
        sizes = (self.latent_dim, head_dim - self.latent_dim)
        return sum(self.part.row_size(size) for size in sizes)

    def head_dim(self, row_size: int) -> int:
        latent_row = self.part.row_size(self.latent_dim)
        return self.latent_dim + self.part.head_dim(row_size - latent_row)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., head_dim]` -> `[..., row_size]`"""
        parts = (x[..., : self.latent_dim], x[..., self.latent_dim :])
        return torch.cat([self.part.encode(part) for part in parts], dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., row_size]` -> `[..., head_dim]`"""
        if self.part.storage_dtype == self.part.compute_dtype:
            return rows
        at = self.part.row_size(self.latent_dim)
        return torch.cat([self.part.decode(part) for part in (rows[..., :at], rows[..., at:])], -1)
