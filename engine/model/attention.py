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


@dataclass(slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed: the matrices that
    would read keys and values of a head out of the latent are applied to its query and to its
    output instead. What is cached is one row a token, the latent and then the key with rope that
    all heads share; to a backend it looks like one KV head whose value is the latent.

    Prompts too: with DeepSeek-V2-Lite's heads on a CPU this is faster than making keys and values
    up to chunks of 128 tokens, and 1.3 to 1.4 times slower in chunks of 512 to 2048."""

    projections: ClassVar[tuple[str, ...]] = ("q_a", "q_b", "kv_a", "o")

    q_a: Projection | None  # to the queries' own latent
    q_a_norm: Norm | None
    q_b: Projection  # a head's rows: without rope, then with
    kv_a: Projection  # the latent's rows, then those of the shared key
    kv_a_norm: Norm
    kv_b: torch.Tensor  # [num_heads, nope_head_dim + v_head_dim, kv_lora_rank]
    o: Projection
    nope_head_dim: int

    def __call__(self, x: torch.Tensor, rotate: Rotate, attend: Attend) -> torch.Tensor:
        num_heads, _, rank = self.kv_b.shape
        low = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        queries = self.q_b(low).view(x.shape[0], num_heads, -1)
        compressed = self.kv_a(x)
        latent = self.kv_a_norm(compressed[:, :rank].contiguous())
        nope, rope = queries.split((self.nope_head_dim, queries.shape[-1] - self.nope_head_dim), -1)
        rotated = rotate(torch.cat((rope, compressed[:, rank:].unsqueeze(1)), dim=1))
        absorbed = torch.bmm(nope.transpose(0, 1), self.kv_b[:, : self.nope_head_dim])
        query = torch.cat((absorbed.transpose(0, 1), rotated[:, :num_heads]), dim=-1)
        key = torch.cat((latent.unsqueeze(1), rotated[:, num_heads:]), dim=-1)
        attended = attend(query, key, key[..., :rank])  # [T, num_heads, rank]
        values = torch.bmm(
            attended.transpose(0, 1), self.kv_b[:, self.nope_head_dim :].transpose(1, 2)
        )
        return values.transpose(0, 1).flatten(1)
