"""KV between a GPU's memory and the host's, beside the engine's work."""

from collections.abc import Sequence

import numpy as np
import torch


class CudaStage:
    """Copies through pinned memory, on a stream of its own, and waits for that stream alone: no
    copy waits for a step of the engine, and no step for a copy.

    That is right only for blocks that nobody else writes: the KV that is read is final, as the
    engine has waited for it before it said so, and what is written is reserved for this transfer.
    """

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._blocks = kv_cache.view(torch.uint8).flatten(1)  # [num_blocks, block_bytes]
        self._flat = self._blocks.view(-1)
        self._stream = torch.cuda.Stream(kv_cache.device)

    def read(self, spans: Sequence[tuple[int, int]]) -> memoryview:
        """The bytes of `spans` (start and end in the flat cache), joined."""
        staged = _pinned(sum(end - start for start, end in spans))
        offset = 0
        with torch.cuda.stream(self._stream):
            for start, end in spans:
                part = staged[offset : offset + end - start]
                part.copy_(self._flat[start:end], non_blocking=True)
                offset += end - start
        self._stream.synchronize()
        return staged.numpy().data

    def read_blocks(self, block_ids: Sequence[int]) -> np.ndarray:
        """uint8 `[len(block_ids), block_bytes]`"""
        staged = _pinned(len(block_ids) * self._blocks.shape[1]).view(len(block_ids), -1)
        with torch.cuda.stream(self._stream):
            for row, block_id in zip(staged, block_ids, strict=True):
                row.copy_(self._blocks[block_id], non_blocking=True)
        self._stream.synchronize()
        return staged.numpy()

    def write(self, start: int, data: np.ndarray) -> None:
        """uint8 `data` to the flat cache from `start` on; it is there when this returns."""
        staged = _pinned(len(data))
        staged.numpy()[:] = data
        with torch.cuda.stream(self._stream):
            self._flat[start : start + len(data)].copy_(staged, non_blocking=True)
        self._stream.synchronize()


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)
