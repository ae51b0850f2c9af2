"""The other ranks' part of hand-overs: served by each of them, called by rank 0."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from core.errors import HandoverError, RequestError
from kv_transfer.base import KVTransfer, TransferInDoubt, settled
from kv_transfer.grpc_transport import stream_blocks
from kv_transfer.layout import KVShape
from kv_transfer.rank import KVRank, Pulled, PullOrder, Source, SourceRank
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.channel import make_channel
from rpc.status import error_from_rpc, translated_errors
from worker.ranks import check_incarnation

logger = logging.getLogger(__name__)

_INFO_S = 10.0
_CHECKSUMS_S = 30.0
# That a rank has to say how a stopped pull ended: a little more than a transport takes.
_STOP_S = 3.0


def offers_of(transports: Sequence[pb.TransportOffer]) -> dict[str, bytes]:
    return {offer.name: offer.payload for offer in transports}


def offers_to_pb(transports: Mapping[str, KVTransfer]) -> list[pb.TransportOffer]:
    return [
        pb.TransportOffer(name=name, payload=transport.offer())
        for name, transport in transports.items()
    ]


# ------------------------------------------------------------------ a rank's side


class FollowerKvService(worker_pb2_grpc.KvServiceServicer):
    """Lets peers read this rank's blocks over gRPC. It knows no leases, as RDMA does not: whether
    the blocks were pinned all along is for rank 0's fence to say."""

    def __init__(self, rank: KVRank, incarnation: str) -> None:
        self._rank = rank
        self._incarnation = incarnation

    async def Pull(self, request: pb.PullRequest, context: grpc.aio.ServicerContext) -> None:
        async with translated_errors(context):
            check_incarnation(request.incarnation, self._incarnation)
            async for piece in stream_blocks(self._rank.kv_cache, request):
                await context.write(piece)


class KvRankService(worker_pb2_grpc.KvRankServiceServicer):
    """What rank 0 asks of this rank. A pull whose caller is gone is stopped, and watched until
    nothing writes any more."""

    def __init__(self, rank: KVRank, incarnation: str) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._pulls: set[asyncio.Task[Pulled]] = set()

    async def GetRankInfo(
        self, request: pb.GetRankInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.KvRankInfo:
        return pb.KvRankInfo(
            incarnation=self._incarnation, transports=offers_to_pb(self._rank.transports)
        )

    async def PullIntoRank(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        # Not a generator: a cancelled call must always arrive as CancelledError in here.
        async with translated_errors(context):
            command = await context.read()
            if command is grpc.aio.EOF or not command.HasField("start"):
                raise RequestError("a pull begins with its start")
            work = self._rank.pull(*_from_pb(command.start, self._rank.shape))
            pull = asyncio.create_task(work, name=f"pull {command.start.request_id}")
            self._pulls.add(pull)
            pull.add_done_callback(self._pulls.discard)
            listener = asyncio.create_task(_stop_on_command(context, pull))
            try:
                await asyncio.wait({pull})
            finally:
                pull.cancel()
                listener.cancel()
            await _report(pull, context)

    async def SourceChecksums(
        self, request: pb.SourceChecksumsRequest, context: grpc.aio.ServicerContext
    ) -> pb.SourceChecksumsResponse:
        async with translated_errors(context):
            destination = self._rank.shape.of_peer(
                {
                    "block_size": str(request.block_size),
                    "tensor_parallel_size": str(request.tensor_parallel_size),
                }
            )
            sums = await self._rank.source_checksums(
                destination, request.num_tokens, request.start, request.block_ids
            )
            ranks = [pb.RankChecksums(checksums=values) for values in sums]
            return pb.SourceChecksumsResponse(ranks=ranks)


async def _stop_on_command(context: grpc.aio.ServicerContext, pull: asyncio.Task[Pulled]) -> None:
    await context.read()  # the one command that may follow, or the end of the caller
    pull.cancel()


async def _report(pull: asyncio.Task[Pulled], context: grpc.aio.ServicerContext) -> None:
    if pull.cancelled():
        await context.write(pb.RankPullEvent(stopped=pb.RankPullStopped()))
        return
    error = pull.exception()
    if error is None:
        await context.write(pb.RankPullEvent(done=_pulled_to_pb(pull.result())))
    elif isinstance(error, TransferInDoubt):
        failed = pb.RankPullFailed(message=error.message)
        await context.write(pb.RankPullEvent(in_doubt=failed))
        await error.quiet.wait()
        await context.write(pb.RankPullEvent(quiet=pb.RankPullQuiet()))
    else:
        logger.info("a pull of this rank failed: %s", error)
        message = error.message if isinstance(error, HandoverError) else str(error)
        await context.write(pb.RankPullEvent(failed=pb.RankPullFailed(message=message)))


# ------------------------------------------------------------------ rank 0's side


class RemoteRank:
    """Another rank, as `kv_transfer.rank.RankHandle`. Owns its channel.

    A rank that breaks off in the middle of a pull, or does not say how a stopped one ended, may
    still write: TransferInDoubt, and `quiet` only if it says so later. When its process is gone
    for good the whole worker ends."""

    def __init__(self, rank: int, address: str, stop_s: float = _STOP_S) -> None:
        self._rank = rank
        self.address = address
        self._stop_s = stop_s
        self._channel = make_channel(address)
        self._stub = worker_pb2_grpc.KvRankServiceStub(self._channel)
        self._calls: set[asyncio.Task[None]] = set()

    async def info(self) -> pb.KvRankInfo:
        try:
            info: pb.KvRankInfo = await self._stub.GetRankInfo(
                pb.GetRankInfoRequest(), timeout=_INFO_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"rank {self._rank}") from error
        info.address = self.address
        return info

    async def pull(self, source: Source, order: PullOrder) -> Pulled:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[pb.RankPullEvent | None] = loop.create_future()
        quiet, stop = asyncio.Event(), asyncio.Event()
        call = asyncio.create_task(self._call(_to_pb(source, order), ended, quiet, stop))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

        def on_cancel() -> None:
            stop.set()
            loop.call_later(self._stop_s, _give_up, ended)

        cancelled = await settled(ended, on_cancel)
        event = ended.result()
        kind = None if event is None else event.WhichOneof("event")
        if event is None or kind == "in_doubt":
            what = "does not say what it writes" if event is None else event.in_doubt.message
            raise TransferInDoubt(f"rank {self._rank}: {what}", quiet) from cancelled
        if cancelled is not None:
            raise cancelled
        if kind != "done":
            what = event.failed.message if kind == "failed" else "the pull was stopped"
            raise HandoverError(f"rank {self._rank}: {what}")
        return _pulled_from_pb(event.done)

    async def _call(
        self,
        order: pb.RankPull,
        ended: "asyncio.Future[pb.RankPullEvent | None]",
        quiet: asyncio.Event,
        stop: asyncio.Event,
    ) -> None:
        """Reads a pull's events to their end. Sets `ended` in any case, to None if the rank breaks
        off."""
        call = self._stub.PullIntoRank()
        stopper = asyncio.create_task(_send_stop(call, stop))
        try:
            await call.write(pb.RankPullCommand(start=order))
            while (event := await call.read()) is not grpc.aio.EOF:
                if event.HasField("quiet"):
                    quiet.set()
                elif not ended.done():
                    ended.set_result(event)
                if not event.HasField("in_doubt"):
                    break
        except grpc.aio.AioRpcError as error:
            logger.warning("rank %d broke off a pull: %s", self._rank, error.details())
        finally:
            stopper.cancel()
            call.cancel()
            _give_up(ended)

    async def source_checksums(
        self, destination: KVShape, num_tokens: int, start: int, block_ids: Sequence[int]
    ) -> list[list[int]]:
        request = pb.SourceChecksumsRequest(
            block_size=destination.block_size,
            tensor_parallel_size=destination.tensor_parallel_size,
            num_tokens=num_tokens,
            start=start,
            block_ids=block_ids,
        )
        try:
            response: pb.SourceChecksumsResponse = await self._stub.SourceChecksums(
                request, timeout=_CHECKSUMS_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"rank {self._rank}") from error
        return [list(rank.checksums) for rank in response.ranks]

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._channel.close()


async def _send_stop(call: Any, stop: asyncio.Event) -> None:
    await stop.wait()
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(pb.RankPullCommand(stop=pb.RankPullStop()))


def _give_up(ended: "asyncio.Future[pb.RankPullEvent | None]") -> None:
    if not ended.done():
        ended.set_result(None)


# ------------------------------------------------------------------ messages


def _to_pb(source: Source, order: PullOrder) -> pb.RankPull:
    ranks = [
        pb.KvRankInfo(
            address=rank.address,
            incarnation=rank.incarnation,
            transports=[pb.TransportOffer(name=n, payload=p) for n, p in rank.offers.items()],
        )
        for rank in source.ranks
    ]
    return pb.RankPull(
        request_id=order.request_id,
        source=pb.KvSource(
            worker_id=source.worker_id, block_size=source.shape.block_size, ranks=ranks
        ),
        num_tokens=order.num_tokens,
        first_token=order.first_token,
        start=order.start,
        stop=order.stop,
        remote_ids=order.remote_ids,
        local_ids=order.local_ids,
        wants_checksums=order.wants_checksums,
    )


def _from_pb(message: pb.RankPull, shape: KVShape) -> tuple[Source, PullOrder]:
    source = message.source
    theirs = shape.of_peer(
        {"block_size": str(source.block_size), "tensor_parallel_size": str(len(source.ranks))}
    )
    ranks = tuple(
        SourceRank(rank.address, rank.incarnation, offers_of(rank.transports))
        for rank in source.ranks
    )
    order = PullOrder(
        request_id=message.request_id,
        num_tokens=message.num_tokens,
        first_token=message.first_token,
        start=message.start,
        stop=message.stop,
        remote_ids=tuple(message.remote_ids),
        local_ids=tuple(message.local_ids),
        wants_checksums=message.wants_checksums,
    )
    return Source(source.worker_id, theirs, ranks), order


def _pulled_to_pb(pulled: Pulled) -> pb.RankPulled:
    return pb.RankPulled(
        num_bytes=pulled.num_bytes,
        checksums=pulled.checksums,
        carriers=[
            pb.KvCarrier(peer_id=peer, transport=transport, carrier=carrier)
            for peer, transport, carrier in pulled.carriers
        ],
    )


def _pulled_from_pb(message: pb.RankPulled) -> Pulled:
    carriers = tuple((c.peer_id, c.transport, c.carrier) for c in message.carriers)
    return Pulled(message.num_bytes, tuple(message.checksums), carriers)
