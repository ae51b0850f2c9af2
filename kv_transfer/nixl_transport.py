"""KV over NIXL: the decode worker READs blocks out of the prefill worker's registered memory."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from core.errors import HandoverError
from kv_transfer.base import (
    KVTransfer,
    Peer,
    Pieces,
    TransferInDoubt,
    check_block_ids,
    check_pieces,
    settled,
)
from kv_transfer.nixl_agent import NixlAgent, NixlOffer, ReadBatch
from kv_transfer.nixl_mover import Job, Mover, Outcome

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_PIECES = 4096


class NixlTransfer(KVTransfer):
    """One NIXL agent for one incarnation of a worker; all calls to it are made by its mover.

    A pull without progress for `liveness_s`, or a cancelled one that is not quiet after
    `cancel_s`, raises TransferInDoubt. Its reads are watched on, and until they are over no new
    pull from that incarnation is accepted.
    """

    name = "nixl"

    def __init__(
        self,
        kv_cache: torch.Tensor,
        worker_id: str,
        incarnation: str,
        *,
        liveness_s: float = 10.0,
        cancel_s: float = 1.0,
    ) -> None:
        """Registers `kv_cache`, which takes about as long as a copy of it. Raises ImportError or
        OSError where NIXL is missing, and NIXL's own errors if it cannot start."""
        self.kv_cache = kv_cache
        agent = NixlAgent(f"{worker_id}/{incarnation}", kv_cache)
        self._own = agent.offer
        self._payload = agent.offer.encode()
        self._mover = Mover(agent, liveness_s, cancel_s)
        self._carriers: dict[str, tuple[str, str]] = {}  # worker -> incarnation, carrier
        self._is_closed = False

    def offer(self) -> bytes:
        return self._payload

    async def pull(
        self,
        peer: Peer,
        request_id: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        pieces: Sequence[Pieces] | None = None,
    ) -> None:
        offer, own = NixlOffer.decode(peer.payload), self._own
        if self._is_closed:
            raise HandoverError("the KV transport is closed")
        check_block_ids(
            remote_block_ids,
            offer.num_blocks,
            local_block_ids,
            own.num_blocks,
            may_repeat=pieces is not None,
        )
        if pieces is not None:
            check_pieces(pieces, len(local_block_ids), offer.block_bytes, own.block_bytes)
        elif offer.block_bytes != own.block_bytes:
            raise HandoverError(
                f"blocks of {peer.worker_id} have {offer.block_bytes} bytes, ours {own.block_bytes}"
            )
        if not local_block_ids:
            return
        remote, local = (np.asarray(ids, np.int32) for ids in (remote_block_ids, local_block_ids))
        if pieces is None:
            batches = _block_batches(remote, local, own.block_bytes)
        else:
            batches = _piece_batches(offer, own, remote, local, pieces)
        await self._run(peer, offer, batches)

    async def _run(self, peer: Peer, offer: NixlOffer, batches: list[ReadBatch]) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Outcome, Exception | None, str]] = loop.create_future()
        quiet = asyncio.Event()
        job = Job(
            worker_id=peer.worker_id,
            offer=offer,
            batches=batches,
            on_end=lambda *result: _call(loop, ended.set_result, result),
            on_quiet=lambda: _call(loop, quiet.set),
        )
        self._mover.submit(job)
        cancelled = await settled(ended, lambda: self._mover.cancel(job))
        outcome, error, carrier = ended.result()
        if outcome is Outcome.IN_DOUBT:
            why = f": {_cause(error)}" if error else ""
            raise TransferInDoubt(
                f"NIXL read from {peer.worker_id} makes no progress{why}", quiet
            ) from (cancelled or error)
        if cancelled is not None:
            raise cancelled
        if outcome is Outcome.FAILED:
            raise HandoverError(
                f"NIXL read from {peer.worker_id} failed: {_cause(error)}"
            ) from error
        self._carriers[peer.worker_id] = (peer.incarnation, carrier)

    def carrier(self, peer: Peer) -> str:
        """The UCX transport of the last pull ("cma", "tcp", "rc_mlx5", ...), read from UCX's own
        log. UCX logs it per kind of endpoint, so it is exact for the peers of one kind (this
        machine, other machines) as long as they have the same network devices. "ucx" where the
        user has turned UCX's log elsewhere."""
        incarnation, carrier = self._carriers.get(peer.worker_id, ("", ""))
        return carrier if incarnation == peer.incarnation else ""

    def forget(self, worker_id: str) -> None:
        self._carriers.pop(worker_id, None)
        self._mover.forget(worker_id)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.to_thread(self._mover.stop)


def _block_batches(remote: np.ndarray, local: np.ndarray, block_bytes: int) -> list[ReadBatch]:
    step = max(1, _BATCH_BYTES // block_bytes)
    return [
        ReadBatch(remote[start : start + step], local[start : start + step])
        for start in range(0, len(local), step)
    ]


def _piece_batches(
    offer: NixlOffer,
    own: NixlOffer,
    remote_ids: np.ndarray,
    local_ids: np.ndarray,
    pieces: Sequence[Pieces],
) -> list[ReadBatch]:
    """One descriptor for each piece; pieces that are neighbours on both sides are one."""
    kinds = {kind: np.array(kind, np.uint64).reshape(-1, 3) for kind in set(pieces)}
    each = [kinds[kind] for kind in pieces]
    counts = [len(kind) for kind in each]

    def addresses_of(side: NixlOffer, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        blocks = np.repeat(ids.astype(np.uint64), counts) * np.uint64(side.block_bytes)
        return np.uint64(side.base_address) + blocks + offsets

    reads, writes, length = np.concatenate(each).T
    read, write = addresses_of(offer, remote_ids, reads), addresses_of(own, local_ids, writes)
    is_joined = (read[1:] == read[:-1] + length[:-1]) & (write[1:] == write[:-1] + length[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~is_joined)))
    lengths = np.add.reduceat(length, starts)

    def descriptors(addresses: np.ndarray, device_id: int) -> np.ndarray:
        devices = np.full(len(starts), device_id, np.uint64)
        return np.ascontiguousarray(np.stack((addresses[starts], lengths, devices), axis=1))

    remote, local = descriptors(read, offer.device_id), descriptors(write, own.device_id)
    # A batch ends with the piece that fills it.
    before = np.cumsum(lengths) - lengths
    number = np.maximum(before // _BATCH_BYTES, np.arange(len(starts)) // _BATCH_PIECES)
    cuts = np.flatnonzero(np.diff(number)) + 1
    both = zip(np.split(remote, cuts), np.split(local, cuts), strict=True)
    return [ReadBatch(*batch) for batch in both]


def _cause(error: Exception | None) -> str:
    if isinstance(error, HandoverError):
        return error.message
    return f"{type(error).__name__.removeprefix('nixl')}: {error}"


def _call(loop: asyncio.AbstractEventLoop, function, *args) -> None:
    """The loop may have been closed while a transfer was in doubt."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)
