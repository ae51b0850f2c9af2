"""The prefill workers that this decode worker has met."""

from dataclasses import dataclass

import grpc

from core.errors import IncompatiblePeerError, StalePeerError
from kv_transfer.compatibility import check
from kv_transfer.rank import Source, SourceRank
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.channel import make_channel
from rpc.status import error_from_rpc
from worker.kv_ranks import offers_of
from worker.runtime import WorkerRuntime

_INFO_SECONDS = 5.0


@dataclass(slots=True)
class PrefillPeer:
    """One incarnation of a prefill worker: where it is and how its blocks are read."""

    incarnation: str
    source: Source
    channel: grpc.aio.Channel
    kv: worker_pb2_grpc.KvServiceStub


class PeerBook:
    """One entry a worker id: an incarnation replaces the one before it, whose connections close."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._peers: dict[str, PrefillPeer] = {}

    async def get(self, source: pb.PeerAddress) -> PrefillPeer:
        """Meets a peer on first use. Raises UnavailableError, StalePeerError,
        IncompatiblePeerError."""
        known = self._peers.get(source.worker_id)
        if known is not None and known.incarnation == source.incarnation:
            return known
        met = await self._meet(source)
        raced = self._peers.get(source.worker_id)
        if raced is not None and raced.incarnation == source.incarnation:
            await met.channel.close()
            return raced
        self._peers[source.worker_id] = met
        if raced is not None:
            for transfer in self._runtime.transports.values():
                for rank in range(len(raced.source.ranks)):
                    transfer.forget(raced.source.peer_id(rank))
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
            met = self._source(source, info)
            self._runtime.kv_rank.transport_from(met)
        except BaseException:
            await channel.close()
            raise
        stub = worker_pb2_grpc.KvServiceStub(channel)
        return PrefillPeer(source.incarnation, met, channel, stub)

    def _source(self, source: pb.PeerAddress, info: pb.WorkerInfo) -> Source:
        shape = self._runtime.kv_ranks.shape.of_peer(info.compatibility)
        # The first rank is the worker itself, at the address where this worker reaches it.
        ranks = [SourceRank(source.address, source.incarnation, offers_of(info.transports))]
        ranks += [SourceRank(r.address, r.incarnation, offers_of(r.transports)) for r in info.ranks]
        if len(ranks) != shape.tensor_parallel_size:
            raise IncompatiblePeerError(
                f"{source.worker_id} has {len(ranks)} ranks, but says tensor_parallel_size "
                f"{shape.tensor_parallel_size}"
            )
        return Source(source.worker_id, shape, tuple(ranks))

    async def close(self) -> None:
        for known in self._peers.values():
            await known.channel.close()
        self._peers.clear()
