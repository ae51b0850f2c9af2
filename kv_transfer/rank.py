"""One tensor-parallel rank's part of a hand-over, and all ranks of a worker together.

Every rank has a KV tensor of its own, with the same block ids. Rank 0 knows the leases and the
states of hand-overs; a rank is told which tokens to pull into which blocks, and works out the
copies itself (`layout.CopyPlan`).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_transfer.base import KVTransfer, Peer, block_bytes
from kv_transfer.checksum import block_checksums
from kv_transfer.fan_out import together
from kv_transfer.layout import BlockCopy, CopyPlan, KVShape
from kv_transfer.select import choose


@dataclass(frozen=True, slots=True)
class SourceRank:
    """Where one rank's blocks can be read."""

    address: str  # host:port of its gRPC server
    incarnation: str
    offers: Mapping[str, bytes]  # by transport, as `KVTransfer.offer()` made them there


@dataclass(frozen=True, slots=True)
class Source:
    """One incarnation of a worker whose KV can be read."""

    worker_id: str
    shape: KVShape
    ranks: tuple[SourceRank, ...]

    def peer_id(self, rank: int) -> str:
        return f"{self.worker_id}/{rank}" if rank else self.worker_id

    def peer(self, rank: int, transport: str) -> Peer:
        at = self.ranks[rank]
        return Peer(self.peer_id(rank), at.incarnation, at.address, at.offers[transport])


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Which tokens to pull: those of the source's blocks [start, stop) from `first_token` on."""

    request_id: str
    num_tokens: int  # of the whole prompt
    first_token: int  # where one of the destination's blocks begins
    start: int
    stop: int
    remote_ids: tuple[int, ...]  # the source's blocks at [start, stop)
    local_ids: tuple[int, ...]  # the destination's, from the first that is written on
    wants_checksums: bool


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull has brought to one rank."""

    num_bytes: int
    checksums: tuple[int, ...]  # of each copy, in plan order, as it lies here now
    carriers: tuple[tuple[str, str, str], ...]  # (peer, transport, carrier)


class RankHandle(Protocol):
    """A rank, here or in another process."""

    async def pull(self, source: Source, order: PullOrder) -> Pulled:
        """As `KVTransfer.pull`: nothing writes any more once it has ended, or TransferInDoubt."""

    async def source_checksums(
        self,
        destination: KVShape,
        num_tokens: int,
        start: int,
        block_ids: Sequence[int],
    ) -> list[list[int]]:
        """For each rank of a destination, of the copies that it takes from this rank's blocks,
        which are at `start` and behind, in plan order."""


class KVRank:
    """A rank of this process: its KV tensor and what reads into it. Owns neither."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        shape: KVShape,
        transports: Mapping[str, KVTransfer],
        rank: int = 0,
    ) -> None:
        if block_bytes(kv_cache) != shape.block_bytes:
            raise ValueError(f"blocks have {block_bytes(kv_cache)} bytes, {shape} says otherwise")
        self.kv_cache, self.shape, self.transports, self.rank = kv_cache, shape, transports, rank

    async def pull(self, source: Source, order: PullOrder) -> Pulled:
        plan = CopyPlan(source.shape, self.shape, self.rank, order.num_tokens)
        copies = plan.copies(order.start, order.stop, order.first_token)
        begin = max(order.start * source.shape.block_size, order.first_token)
        first_local = begin // self.shape.block_size
        local_ids = [order.local_ids[copy.position - first_local] for copy in copies]
        givers = sorted({copy.source_rank for copy in copies})
        carriers = await together(
            [self._pull_from(source, giver, order, copies, local_ids) for giver in givers]
        )
        checksums: list[int] = []
        if order.wants_checksums:
            spans = [[(write, length) for _, write, length in copy.pieces] for copy in copies]
            checksums = await asyncio.to_thread(block_checksums, self.kv_cache, local_ids, spans)
        return Pulled(sum(copy.num_bytes for copy in copies), tuple(checksums), tuple(carriers))

    async def _pull_from(
        self,
        source: Source,
        giver: int,
        order: PullOrder,
        copies: list[BlockCopy],
        local_ids: list[int],
    ) -> tuple[str, str, str]:
        transfer = self.transport_from(source, giver)
        peer = source.peer(giver, transfer.name)
        mine = [i for i, copy in enumerate(copies) if copy.source_rank == giver]
        whole = ((0, 0, self.shape.block_bytes),)
        is_whole = source.shape.block_bytes == self.shape.block_bytes and all(
            copies[i].pieces == whole for i in mine
        )
        await transfer.pull(
            peer,
            order.request_id,
            [order.remote_ids[copies[i].source_position - order.start] for i in mine],
            [local_ids[i] for i in mine],
            None if is_whole else [copies[i].pieces for i in mine],
        )
        return peer.worker_id, transfer.name, transfer.carrier(peer)

    def transport_from(self, source: Source, giver: int = 0) -> KVTransfer:
        """Raises IncompatiblePeerError without a common one."""
        return choose(self.transports, source.ranks[giver].offers, source.worker_id)

    async def source_checksums(
        self, destination: KVShape, num_tokens: int, start: int, block_ids: Sequence[int]
    ) -> list[list[int]]:
        found = []
        for rank in range(destination.tensor_parallel_size):
            plan = CopyPlan(self.shape, destination, rank, num_tokens)
            copies = [
                copy
                for copy in plan.copies(start, start + len(block_ids))
                if copy.source_rank == self.rank
            ]
            ids = [block_ids[copy.source_position - start] for copy in copies]
            spans = [[(read, length) for read, _, length in copy.pieces] for copy in copies]
            found.append(await asyncio.to_thread(block_checksums, self.kv_cache, ids, spans))
        return found


class KVRanks:
    """All ranks of a worker, rank 0 first, as one."""

    def __init__(self, shape: KVShape, ranks: Sequence[RankHandle]) -> None:
        if len(ranks) != shape.tensor_parallel_size:
            raise ValueError(f"{len(ranks)} ranks, {shape} says otherwise")
        self.shape, self._ranks = shape, tuple(ranks)

    async def pull(self, source: Source, order: PullOrder) -> list[Pulled]:
        """One result for each rank; the promises are `KVTransfer.pull`'s. When one rank fails, the
        others are stopped."""
        return await together([rank.pull(source, order) for rank in self._ranks])

    async def source_checksums(
        self, destination: KVShape, num_tokens: int, start: int, block_ids: Sequence[int]
    ) -> list[list[int]]:
        """For each rank of a destination, of all copies that it takes from the blocks at `start`
        and behind, in plan order."""
        by_giver = await together(
            [
                rank.source_checksums(destination, num_tokens, start, block_ids)
                for rank in self._ranks
            ]
        )
        stop = start + len(block_ids)
        merged = []
        for rank in range(destination.tensor_parallel_size):
            given: list[Iterator[int]] = [iter(sums[rank]) for sums in by_giver]
            plan = CopyPlan(self.shape, destination, rank, num_tokens)
            merged.append([next(given[c.source_rank]) for c in plan.copies(start, stop)])
        return merged
