"""KV over NIXL: the decode worker READs blocks out of the prefill worker's registered memory."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from core.errors import HandoverError
from kv_transfer.base import KVTransfer, Peer, TransferInDoubt, check_block_ids, settled
from kv_transfer.nixl_agent import NixlAgent, NixlOffer
from kv_transfer.nixl_mover import Job, Mover, Outcome


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
    ) -> None:
        offer = NixlOffer.decode(peer.payload)
        if self._is_closed:
            raise HandoverError("the KV transport is closed")
        if offer.block_bytes != self._own.block_bytes:
            raise HandoverError(
                f"blocks of {peer.worker_id} have {offer.block_bytes} bytes, "
                f"ours {self._own.block_bytes}"
            )
        check_block_ids(remote_block_ids, offer.num_blocks, local_block_ids, self._own.num_blocks)
        if not local_block_ids:
            return
        await self._run(peer, offer, remote_block_ids, local_block_ids)

    async def _run(
        self, peer: Peer, offer: NixlOffer, remote_ids: Sequence[int], local_ids: Sequence[int]
    ) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Outcome, Exception | None, str]] = loop.create_future()
        quiet = asyncio.Event()
        job = Job(
            worker_id=peer.worker_id,
            offer=offer,
            remote_ids=np.asarray(remote_ids, dtype=np.int32),
            local_ids=np.asarray(local_ids, dtype=np.int32),
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


def _cause(error: Exception | None) -> str:
    if isinstance(error, HandoverError):
        return error.message
    return f"{type(error).__name__.removeprefix('nixl')}: {error}"


def _call(loop: asyncio.AbstractEventLoop, function, *args) -> None:
    """The loop may have been closed while a transfer was in doubt."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)
