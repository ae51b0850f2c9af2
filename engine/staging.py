"""Numbers that Python has made, on their way to the device."""

from collections.abc import Sequence

import numpy as np
import torch


class Staging:
    """Carries the numbers of one step to its device: one copy, asynchronous, out of pinned memory
    that is allocated once.

    What `put` returned is valid until the next `put`. Parts of the same lengths lie at the same
    addresses as long as all fit into `capacity`, which is what a captured graph counts on. On a
    CPU nothing is staged.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, capacity: int = 1024) -> None:
        self._device, self._dtype = device, dtype
        self._numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._is_staged = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        if self._is_staged:
            self._allocate(capacity)

    def put(self, *parts: Sequence[int] | Sequence[float]) -> list[torch.Tensor]:
        """Each part as a tensor on the device."""
        if not self._is_staged:
            return [torch.from_numpy(np.array(part, dtype=self._numpy_dtype)) for part in parts]
        total = self._gather(parts)
        self._copy_to(self._there[:total])
        return list(self._there[:total].split([len(part) for part in parts]))

    def write(self, out: torch.Tensor, *parts: Sequence[int] | Sequence[float]) -> None:
        """All parts, one after the other, to the start of `out` on the device."""
        if not self._is_staged:
            out[: sum(map(len, parts))] = torch.cat(self.put(*parts))
            return
        self._copy_to(out[: self._gather(parts)])

    def _gather(self, parts: Sequence[Sequence[int] | Sequence[float]]) -> int:
        """Into the pinned memory; returns how many."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy could still be reading
        total = sum(map(len, parts))
        if total > self._host.numel():
            self._allocate(2 * total)
        end = 0
        for part in parts:
            start, end = end, end + len(part)
            self._numbers[start:end] = part
        return total

    def _copy_to(self, out: torch.Tensor) -> None:
        out.copy_(self._host[: len(out)], non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def _allocate(self, capacity: int) -> None:
        self._host = torch.empty(capacity, dtype=self._dtype, pin_memory=True)
        self._there = torch.empty(capacity, dtype=self._dtype, device=self._device)
        self._numbers = self._host.numpy()
