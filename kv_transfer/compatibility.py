"""What two workers must have in common before KV may pass between them."""

from collections.abc import Mapping

import torch

from core.errors import IncompatiblePeerError

# Grows when the meaning of a KV block, of the commit record or of the hand-over changes.
PROTOCOL_VERSION = "1"


def describe_cache(kv_cache: torch.Tensor, block_size: int, **more: str) -> dict[str, str]:
    """The compatibility map of a worker: protocol, dtype and layout of its blocks
    (`kv_cache` is `[num_blocks, ...]`), tokens in a block, and `more`: what else the meaning of
    a block depends on (model fingerprint, rope, tensor-parallel degree)."""
    return {
        "protocol": PROTOCOL_VERSION,
        "kv_dtype": str(kv_cache.dtype).removeprefix("torch."),
        "block_shape": "x".join(str(size) for size in kv_cache.shape[1:]),
        "block_size": str(block_size),
        **more,
    }


def check(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises IncompatiblePeerError naming every field that differs, with both values. A field
    that only one side has is a difference."""
    differing = [
        f"{name} (ours {ours.get(name, 'unset')}, theirs {theirs.get(name, 'unset')})"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise IncompatiblePeerError("workers differ in " + ", ".join(differing))
