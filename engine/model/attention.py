"""The kinds of attention that a layer may have: from its input to the rows that its output
projection takes. Each is a strategy of the one decoder and knows nothing of lengths or blocks."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from engine.model.layers import Attend, Norm, Projection, Rotate


@dataclass(slots=True)
class MultiHeadAttention:
    """Heads of queries over fewer or as many heads of keys and values (Ainslie et al.,
    arXiv:2305.13245)."""

    projections: ClassVar[tuple[str, ...]] = ("qkv", "o")

    qkv: Projection  # rows of q, then k, then v
    q_norm: Norm | None
    k_norm: Norm | None
    o: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, x: torch.Tensor, rotate: Rotate, attend: Attend) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(qkv[:, : self.num_heads])
            key = self.k_norm(qkv[:, self.num_heads : num_rotated])
            query_key = torch.cat((query, key), dim=1)
        query_key = rotate(query_key)
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        return attend(query, key, value).flatten(1)
