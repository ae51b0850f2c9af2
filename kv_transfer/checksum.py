"""Checksums of KV blocks: XXH3-64 over the bytes of a block as they lie in the cache.

They catch a block that was overwritten, truncated or mixed up on its way; they are no defence
against somebody who forges blocks.
"""

from collections.abc import Iterator, Sequence

import torch
import xxhash

from core.errors import CorruptBlockError
from kv_transfer.cuda_stage import CudaStage
from kv_transfer.memory import flat_bytes

_CUDA_STAGE_BLOCKS = 32


def block_checksums(
    kv_cache: torch.Tensor,
    block_ids: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[int]:
    """One checksum for each of `block_ids`, in order, or of `spans[i]` (offset and length, bytes)
    of the i-th, joined. `kv_cache` is `[num_blocks, ...]`. Holds the GIL only between blocks; run
    it in a thread."""
    blocks = _blocks(kv_cache, block_ids)
    if spans is None:
        return [xxhash.xxh3_64_intdigest(block) for block in blocks]
    return [_digest(block, parts) for block, parts in zip(blocks, spans, strict=True)]


def _digest(block: memoryview, spans: Sequence[tuple[int, int]]) -> int:
    if len(spans) == 1:
        ((offset, length),) = spans
        return xxhash.xxh3_64_intdigest(block[offset : offset + length])
    digest = xxhash.xxh3_64()
    for offset, length in spans:
        digest.update(block[offset : offset + length])
    return digest.intdigest()


def compare(found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises CorruptBlockError naming the first position whose checksum differs."""
    if len(found) != len(expected):
        raise CorruptBlockError(f"{len(expected)} checksums for {len(found)} KV blocks")
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            raise CorruptBlockError(
                f"KV block at position {position} of {len(expected)} does not match its checksum"
            )


def _blocks(kv_cache: torch.Tensor, block_ids: Sequence[int]) -> Iterator[memoryview]:
    if kv_cache.device.type == "cpu":
        flat = flat_bytes(kv_cache)
        yield from (flat[block_id].data for block_id in block_ids)
        return
    stage = CudaStage(kv_cache)
    for start in range(0, len(block_ids), _CUDA_STAGE_BLOCKS):
        some = stage.read_blocks(block_ids[start : start + _CUDA_STAGE_BLOCKS])
        yield from (block.data for block in some)
