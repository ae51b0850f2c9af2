"""Which attention backend reads a KV cache."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from core.errors import ModelError
from engine.attention import flashinfer_paged
from engine.attention.base import AttentionBackend, AttentionLayer
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.kv_format import KVFormat, LatentFormat
from engine.attention.torch_paged import TorchPagedAttention

logger = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "torch", "flashinfer"]


def make_backend(
    kv_cache: torch.Tensor,
    num_heads: int,
    layers: Sequence[AttentionLayer],
    kv_format: KVFormat | LatentFormat,
    choice: AttentionChoice = "auto",
) -> AttentionBackend:
    """`auto` is FlashInfer where it can read the cache, and says so when it cannot on a GPU.
    Raises ModelError if flashinfer was asked for and cannot be used."""
    if choice != "torch" and (choice == "flashinfer" or kv_cache.device.type == "cuda"):
        reason = flashinfer_paged.why_not(kv_cache, kv_format)
        library = None if reason else flashinfer_paged.load()
        if library is not None:
            logger.info("attention: flashinfer %s", getattr(library, "__version__", ""))
            assert isinstance(kv_format, KVFormat)  # why_not has seen to it
            return FlashInferAttention(kv_cache, num_heads, layers, library, kv_format)
        reason = reason or "it is not installed: pip install 'pdserve[gpu]'"
        if choice == "flashinfer":
            raise ModelError(f"engine.attention: flashinfer cannot be used: {reason}")
        logger.warning("attention: torch, which is slower; not flashinfer: %s", reason)
    return TorchPagedAttention(kv_cache, num_heads, kv_format)
