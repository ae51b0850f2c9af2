"""KvService: what a decode worker may ask about the blocks that are kept for it."""

from dataclasses import replace

import grpc

from core.errors import HandoverError
from kv_transfer.compatibility import check
from kv_transfer.events import Admitted, Commit, Event, EventFeed, Finished, Ready
from kv_transfer.grpc_transport import stream_blocks
from kv_transfer.lease import Lease, LeaseTable
from prefill_worker.commit_checksums import CommitChecksums
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.status import translated_errors
from worker.runtime import WorkerRuntime


class KvService(worker_pb2_grpc.KvServiceServicer):
    def __init__(self, runtime: WorkerRuntime, leases: LeaseTable) -> None:
        self._runtime = runtime
        self._leases = leases
        self._block_size = runtime.settings.engine.block_size

    async def Attach(self, request: pb.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        # Not a generator: a cancelled call must always arrive as CancelledError in here.
        async with translated_errors(context):
            self._runtime.check_incarnation(request.incarnation)
            check(self._runtime.compatibility, dict(request.compatibility))
            destination = self._runtime.kv_ranks.shape.of_peer(request.compatibility)
            lease = self._leases.attach(request.request_id, request.token_digest)
            with CommitChecksums(self._runtime, destination) as checksums:
                try:
                    await self._announce(lease, checksums, context)
                finally:
                    self._leases.detach(lease)

    async def _announce(
        self, lease: Lease, checksums: CommitChecksums, context: grpc.aio.ServicerContext
    ) -> None:
        feed = EventFeed(lease, self._block_size)
        while not feed.is_over:
            lease.changed.clear()
            while (event := feed.next()) is not None:
                if isinstance(event, Commit):
                    event = replace(event, checksums=await checksums.of_all())
                await context.write(_to_pb(event))
                if isinstance(event, Admitted):
                    checksums.admitted(event.block_ids, lease.num_tokens)
                elif isinstance(event, Ready):
                    checksums.ready(event.num_blocks)
            if not feed.is_over:
                await lease.changed.wait()

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseResponse:
        async with translated_errors(context):
            self._runtime.check_incarnation(request.incarnation)
            is_pinned = self._leases.release(request.request_id)
            if is_pinned:
                self._runtime.kv_bytes_sent += request.bytes_read
                self._runtime.transfers_ok += 1
                self._runtime.transport_in_use = request.transport
            return pb.ReleaseResponse(pinned=is_pinned)

    async def Pull(self, request: pb.PullRequest, context: grpc.aio.ServicerContext) -> None:
        async with translated_errors(context):
            self._runtime.check_incarnation(request.incarnation)
            lease = self._leases.get(request.request_id)
            if lease is not None and lease.error is not None:
                raise lease.error  # the cause, which may overtake the Attach stream
            if lease is None or not lease.is_attached or lease.block_ids is None:
                raise HandoverError(f"attempt {request.request_id} holds no blocks here")
            final = set(lease.block_ids[: lease.num_ready_blocks])
            if not final.issuperset(request.block_ids):
                raise HandoverError(f"attempt {request.request_id}: blocks asked for are not its")
            async for piece in stream_blocks(self._runtime.engine.kv_cache, request):
                if lease.state.is_terminal:  # the blocks may be somebody else's by now
                    raise lease.error or HandoverError("the lease has ended")
                await context.write(piece)


def _to_pb(event: Event) -> pb.KvEvent:
    match event:
        case Admitted(block_ids, block_size):
            return pb.KvEvent(admitted=pb.KvAdmitted(block_ids=block_ids, block_size=block_size))
        case Ready(num_blocks):
            return pb.KvEvent(ready=pb.KvReady(num_ready_blocks=num_blocks))
        case Finished(reason):
            return pb.KvEvent(finished=pb.KvFinished(finish_reason=codec.finish_to_pb(reason)))
    return pb.KvEvent(
        commit=pb.KvCommit(
            num_tokens=event.num_tokens,
            token_digest=event.token_digest,
            block_checksums=event.checksums,
            first_token=codec.token_to_pb(event.first_token, event.first_logprobs),
        )
    )
