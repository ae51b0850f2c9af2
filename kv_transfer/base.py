"""The contract of a KV transport.

A worker has one `KVTransfer` per transport it can use, over one KV tensor. The same object serves
both sides: what `offer()` returns lets peers read this worker's blocks, `pull()` reads a peer's.

Ownership. The side that owns the destination starts and ends every copy: `pull` is called by the
decode worker on blocks it has reserved. When `pull` returns, every byte is in place. When it
raises anything, cancellation included, no byte will be written any more: an implementation waits
for the wire to be quiet before it lets the exception out, or raises `TransferInDoubt`, and then
the caller must not reuse the blocks before `quiet` is set. A cancelled pull whose wire does not
fall quiet in time raises `TransferInDoubt` in place of `CancelledError`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.errors import HandoverError


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation of a worker whose blocks can be read."""

    worker_id: str
    incarnation: str
    address: str  # host:port of its gRPC server
    payload: bytes  # of its TransportOffer, as `KVTransfer.offer()` made it there


# What of a pair of blocks is copied: offset in the remote one, in the local one, length; bytes.
Pieces = tuple[tuple[int, int, int], ...]


class TransferInDoubt(HandoverError):
    """A pull ended while its copy may still write into the destination blocks."""

    def __init__(self, message: str, quiet: asyncio.Event) -> None:
        super().__init__(message)
        self.quiet = quiet


class KVTransfer(ABC):
    """Reads KV blocks of peers into the local KV tensor.

    `kv_cache` is `[num_blocks, ...]`, contiguous, block first; blocks are copied whole, or in
    pieces where the two workers' blocks differ in shape (`kv_transfer.layout`).
    All methods are called from one asyncio loop; none blocks it for more than a few hundred
    microseconds. Making one may take longer: memory is registered there.
    """

    name: str
    kv_cache: torch.Tensor

    @abstractmethod
    def offer(self) -> bytes:
        """What a peer needs in order to read this worker's blocks."""

    @abstractmethod
    async def pull(
        self,
        peer: Peer,
        request_id: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        pieces: Sequence[Pieces] | None = None,
    ) -> None:
        """Copies remote block i into local block i, for all i, or `pieces[i]` of it, which must
        not overlap in a local block. Connects on first use of an incarnation, dropping an older
        one of the same worker. Raises HandoverError."""

    @abstractmethod
    def carrier(self, peer: Peer) -> str:
        """What moves the bytes to this peer underneath, as far as known: "cma", "tcp", ...;
        "" before the first pull."""

    @abstractmethod
    def forget(self, worker_id: str) -> None:
        """Drops all state about a peer that is gone."""

    @abstractmethod
    async def close(self) -> None:
        """Deregisters memory and stops threads; pulls in flight fail first."""


def block_bytes(kv_cache: torch.Tensor) -> int:
    """Bytes of one block. Raises ValueError for a tensor whose blocks are not one piece each."""
    if kv_cache.dim() < 2 or not kv_cache.is_contiguous():
        raise ValueError("a KV cache is [num_blocks, ...] and contiguous")
    return kv_cache[0].numel() * kv_cache.itemsize


def check_block_ids(
    remote_ids: Sequence[int],
    num_remote: int | None,
    local_ids: Sequence[int],
    num_local: int,
    may_repeat: bool = False,
) -> None:
    """Refuses a copy that would leave one of the two tensors, or write a block twice unless it
    `may_repeat`. `num_remote` None: the peer checks. Raises HandoverError."""
    if len(remote_ids) != len(local_ids):
        raise HandoverError(f"{len(remote_ids)} remote blocks for {len(local_ids)} local ones")
    if not may_repeat and len(set(local_ids)) != len(local_ids):
        raise HandoverError("a local block is named twice in one pull")
    for side, ids, limit in (("remote", remote_ids, num_remote), ("local", local_ids, num_local)):
        if ids and (min(ids) < 0 or (limit is not None and max(ids) >= limit)):
            raise HandoverError(
                f"{side} block ids {min(ids)}..{max(ids)} are out of range, {side} blocks: {limit}"
            )


def check_pieces(
    pieces: Sequence[Pieces], num_pairs: int, remote_bytes: int | None, local_bytes: int
) -> None:
    """Refuses pieces that leave a block. `remote_bytes` None: the peer checks. Raises
    HandoverError."""
    if len(pieces) != num_pairs:
        raise HandoverError(f"pieces of {len(pieces)} blocks for {num_pairs}")
    for kind in set(pieces):
        for read, write, length in kind:
            is_inside = min(read, write) >= 0 < length and write + length <= local_bytes
            if not is_inside or (remote_bytes is not None and read + length > remote_bytes):
                raise HandoverError(
                    f"a piece of {length} bytes at {read}, for {write}, is outside of its blocks"
                )


async def settled(future: asyncio.Future, on_cancel) -> asyncio.CancelledError | None:
    """Waits for `future` through cancellations: each calls `on_cancel()`, which must make the
    future end soon. Returns the last cancellation, for the caller to raise. The future's own
    outcome is left in it."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    return cancelled
