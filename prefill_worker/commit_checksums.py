"""The checksums of a commit record: of what one decode worker takes, made while it pulls."""

import asyncio
from types import TracebackType
from typing import Self

from kv_transfer.layout import KVShape
from worker.runtime import WorkerRuntime


class CommitChecksums:
    """Sums up blocks on threads as they become final, while the engine computes the next chunk and
    the decode worker pulls. The commit waits for them; the first token does not. Makes none where
    `kv_transfer.checksum` is off."""

    def __init__(self, runtime: WorkerRuntime, destination: KVShape) -> None:
        self._ranks = runtime.kv_ranks
        self._is_on = runtime.settings.config.kv_transfer.checksum
        self._destination = destination
        self._block_ids: tuple[int, ...] = ()
        self._num_tokens = 0
        self._num_ready = 0
        self._parts: list[asyncio.Task[list[list[int]]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for part in self._parts:
            part.cancel()

    def admitted(self, block_ids: tuple[int, ...], num_tokens: int) -> None:
        self._block_ids, self._num_tokens = block_ids, num_tokens

    def ready(self, num_blocks: int) -> None:
        """Blocks up to `num_blocks` are final and pinned."""
        start, self._num_ready = self._num_ready, num_blocks
        if self._is_on:
            work = self._ranks.source_checksums(
                self._destination, self._num_tokens, start, self._block_ids[start:num_blocks]
            )
            self._parts.append(asyncio.create_task(work, name="checksums"))

    async def of_all(self) -> tuple[int, ...]:
        """By rank of the decode worker, in plan order."""
        parts = await asyncio.gather(*self._parts)
        ranks = range(self._destination.tensor_parallel_size)
        return tuple(value for rank in ranks for part in parts for value in part[rank])
