"""The contract of an attention backend over the paged KV cache.

The cache is one tensor with the block first, so that one block is one contiguous piece that a
transport can move: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, 2 being
key and value. Latent attention has one row a token that is both, the latent and then the key that
all heads share: `[num_blocks, num_layers, 1, 1, block_size, latent_dim + rope_head_dim]`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The sequences of one engine step, in order; sequences that decode (query_len 1) first.

    Tokens of all sequences are concatenated: T = sum(query_lens). Sequence i's queries are at
    positions seq_lens[i] - query_lens[i] ... seq_lens[i] - 1; its KV, these included, is in
    block_tables[i].
    """

    query_lens: list[int]
    seq_lens: list[int]  # KV length including this step's tokens
    block_tables: list[list[int]]
    num_decodes: int  # how many of the first sequences have query_len 1 and can be batched
    for_graph: bool = False  # all decode, and `forward` is captured or replayed: see `can_capture`


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer's attention needs to know beyond shapes."""

    index: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window - 1 tokens before it
    logit_softcap: float | None = None


class AttentionBackend(ABC):
    """Writes this step's keys and values into the cache and attends over it.

    `plan` is called once a step and builds everything that depends on lengths and block tables
    alone; `forward` once a layer.
    """

    # Whether, planned for batches of one size with `for_graph`, `forward` is always the same
    # work on the same memory, so that a CUDA graph of it may be replayed.
    can_capture = False

    def reserve_for_graphs(self, max_sequences: int, max_blocks: int) -> None:
        """Called once, before the first plan `for_graph`, of a backend that can capture: the
        most sequences of such a batch, and blocks of all its tables together."""
        raise RuntimeError(f"{type(self).__name__} cannot be captured")

    @abstractmethod
    def plan(self, batch: StepBatch) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim], rope applied
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]; latent: the first part of `key`
    ) -> torch.Tensor:  # [T, num_heads, head_dim of value]
        ...
