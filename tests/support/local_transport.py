"""The in-memory twin of the transports, for tests: workers of one process, faults on demand."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from core.errors import HandoverError
from kv_transfer.base import (
    KVTransfer,
    Peer,
    Pieces,
    TransferInDoubt,
    block_bytes,
    check_block_ids,
    check_pieces,
)
from kv_transfer.memory import flat_bytes


class LocalNetwork:
    """Which incarnations can be reached, and what goes wrong between them.

    `before_block(peer, request_id, position)` is awaited before each block is copied: it may
    sleep (a slow link) or raise HandoverError (a lost one). `after_block(peer, position, bytes)`
    sees the block just written, uint8, and may change it (corruption).
    """

    def __init__(self) -> None:
        self.before_block: Callable[[Peer, str, int], Awaitable[None]] | None = None
        self.after_block: Callable[[Peer, int, np.ndarray], None] | None = None
        self._caches: dict[tuple[str, str], torch.Tensor] = {}
        self._running: dict[str, asyncio.Event] = {}

    def join(self, worker_id: str, incarnation: str, kv_cache: torch.Tensor) -> None:
        self._caches[worker_id, incarnation] = kv_cache

    def kill(self, worker_id: str, incarnation: str) -> None:
        """As SIGKILL: pulls from it fail at their next block."""
        self._caches.pop((worker_id, incarnation), None)
        self.resume(worker_id)

    def stall(self, worker_id: str) -> None:
        """As SIGSTOP: pulls from it make no progress until `resume`."""
        self._running[worker_id] = asyncio.Event()

    def resume(self, worker_id: str) -> None:
        if event := self._running.pop(worker_id, None):
            event.set()

    def cache_of(self, peer: Peer) -> torch.Tensor:
        try:
            return self._caches[peer.worker_id, peer.incarnation]
        except KeyError:
            raise HandoverError(f"{peer.worker_id}/{peer.incarnation} is gone") from None

    async def ready(self, worker_id: str) -> None:
        while event := self._running.get(worker_id):
            await event.wait()


class LocalTransfer(KVTransfer):
    """Copies between tensors of one process, block by block on the loop.

    As over a real wire, a block that was asked for lands even if its pull is given up: a pull
    from a stalled peer ends in TransferInDoubt after `liveness_s` (`cancel_s` if cancelled), and
    its current block is written when the peer resumes, just before `quiet` is set.
    """

    name = "local"

    def __init__(
        self,
        network: LocalNetwork,
        kv_cache: torch.Tensor,
        worker_id: str,
        incarnation: str,
        *,
        liveness_s: float = 10.0,
        cancel_s: float = 1.0,
    ) -> None:
        self.kv_cache = kv_cache
        self._network = network
        self._block_bytes = block_bytes(kv_cache)
        self._liveness_s = liveness_s
        self._cancel_s = cancel_s
        self._carriers: set[tuple[str, str]] = set()
        self._pulls: set[asyncio.Task] = set()
        self._is_closed = False
        network.join(worker_id, incarnation, kv_cache)

    def offer(self) -> bytes:
        return b""

    async def pull(
        self,
        peer: Peer,
        request_id: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        pieces: Sequence[Pieces] | None = None,
    ) -> None:
        if self._is_closed:
            raise HandoverError("the KV transport is closed")
        source, size = self._network.cache_of(peer), self._block_bytes
        check_block_ids(
            remote_block_ids,
            len(source),
            local_block_ids,
            len(self.kv_cache),
            may_repeat=pieces is not None,
        )
        if pieces is not None:
            check_pieces(pieces, len(local_block_ids), block_bytes(source), size)
        elif block_bytes(source) != size:
            raise HandoverError(
                f"blocks of {peer.worker_id} have {block_bytes(source)} bytes, ours {size}"
            )
        kinds = pieces if pieces is not None else [((0, 0, size),)] * len(local_block_ids)
        for position, copy in enumerate(zip(remote_block_ids, local_block_ids, kinds, strict=True)):
            if hook := self._network.before_block:
                await hook(peer, request_id, position)
            await self._bounded(peer, asyncio.create_task(self._copy(peer, position, *copy)))
        self._carriers.add((peer.worker_id, peer.incarnation))

    async def _copy(
        self, peer: Peer, position: int, remote_id: int, local_id: int, pieces: Pieces
    ) -> None:
        await self._network.ready(peer.worker_id)
        if self._is_closed:
            raise HandoverError("the KV transport was closed")
        block = flat_bytes(self.kv_cache)[local_id]
        remote = flat_bytes(self._network.cache_of(peer))[remote_id]
        for read, write, length in pieces:
            block[write : write + length] = remote[read : read + length]
        if hook := self._network.after_block:
            hook(peer, position, block)

    async def _bounded(self, peer: Peer, copy: asyncio.Task) -> None:
        self._pulls.add(copy)
        copy.add_done_callback(self._pulls.discard)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._liveness_s
        cancelled = None
        while not copy.done() and loop.time() < deadline:
            try:
                await asyncio.wait({copy}, timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
                deadline = min(deadline, loop.time() + self._cancel_s)
        if not copy.done():
            quiet = asyncio.Event()
            copy.add_done_callback(lambda task: _note_end(task, quiet))
            raise TransferInDoubt(f"{peer.worker_id} makes no progress", quiet) from cancelled
        failure = copy.exception()  # looked at in any case, or asyncio complains
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure

    def carrier(self, peer: Peer) -> str:
        return "memory" if (peer.worker_id, peer.incarnation) in self._carriers else ""

    def forget(self, worker_id: str) -> None:
        self._carriers = {key for key in self._carriers if key[0] != worker_id}

    async def close(self) -> None:
        self._is_closed = True
        if self._pulls:
            await asyncio.wait(self._pulls, timeout=self._cancel_s)


def _note_end(task: asyncio.Task, quiet: asyncio.Event) -> None:
    if not task.cancelled():
        task.exception()
    quiet.set()
