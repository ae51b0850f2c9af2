"""The prefill workers that this decode worker has met."""

from dataclasses import dataclass

import grpc

from core.errors import StalePeerError
from kv_transfer.base import KVTransfer, Peer
from kv_transfer.compatibility import check
from kv_transfer.select import choose
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.channel import make_channel
from rpc.status import error_from_rpc
from worker.runtime import WorkerRuntime

_INFO_SECONDS = 5.0


@dataclass(slots=True)
class PrefillPeer:
    """One incarnation of a prefill worker: where it is and how its blocks are read."""

    peer: Peer
    channel: grpc.aio.Channel
    kv: worker_pb2_grpc.KvServiceStub
    transfer: KVTransfer


class PeerBook:
    """One entry a worker id: an incarnation replaces the one before it, whose connections close."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._peers: dict[str, PrefillPeer] = {}

    async def get(self, source: pb.PeerAddress) -> PrefillPeer:
        """Meets a peer on first use. Raises UnavailableError, StalePeerError,
        IncompatiblePeerError."""
        known = self._peers.get(source.worker_id)
        if known is not None and known.peer.incarnation == source.incarnation:
            return known
        met = await self._meet(source)
        raced = self._peers.get(source.worker_id)
        if raced is not None and raced.peer.incarnation == source.incarnation:
            await met.channel.close()
            return raced
        self._peers[source.worker_id] = met
        if raced is not None:
            raced.transfer.forget(source.worker_id)
            await raced.channel.close()
        return met

    async def _meet(self, source: pb.PeerAddress) -> PrefillPeer:
        channel = make_channel(source.address)
        try:
            try:
                worker = worker_pb2_grpc.WorkerServiceStub(channel)
                info: pb.WorkerInfo = await worker.GetInfo(
                    pb.GetInfoRequest(), timeout=_INFO_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, source.worker_id) from error
            if info.incarnation != source.incarnation:
                raise StalePeerError(
                    f"{source.worker_id} at {source.address} is incarnation {info.incarnation}, "
                    f"not {source.incarnation}"
                )
            check(self._runtime.compatibility, dict(info.compatibility))
            offers = {offer.name: offer.payload for offer in info.transports}
            transfer = choose(self._runtime.transports, offers, source.worker_id)
            peer = Peer(
                worker_id=source.worker_id,
                incarnation=source.incarnation,
                address=source.address,
                payload=offers[transfer.name],
            )
        except BaseException:
            await channel.close()
            raise
        return PrefillPeer(peer, channel, worker_pb2_grpc.KvServiceStub(channel), transfer)

    async def close(self) -> None:
        for known in self._peers.values():
            await known.channel.close()
        self._peers.clear()
