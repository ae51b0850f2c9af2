"""KvService: what a decode worker may ask about the blocks that are kept for it."""

from collections.abc import AsyncIterator

import grpc

from core.errors import HandoverError
from kv_transfer.compatibility import check
from kv_transfer.grpc_transport import stream_blocks
from kv_transfer.lease import Lease, LeaseState, LeaseTable
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.status import translated_errors
from worker.runtime import WorkerRuntime


class KvService(worker_pb2_grpc.KvServiceServicer):
    def __init__(self, runtime: WorkerRuntime, leases: LeaseTable) -> None:
        self._runtime = runtime
        self._leases = leases

    async def Attach(self, request: pb.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        # Not a generator: a cancelled call must always arrive as CancelledError in here.
        async with translated_errors(context):
            self._runtime.check_incarnation(request.incarnation)
            check(self._runtime.compatibility, dict(request.compatibility))
            lease = self._leases.attach(request.request_id, request.token_digest)
            try:
                async for event in self._events(lease):
                    await context.write(event)
            finally:
                self._leases.detach(lease)

    async def _events(self, lease: Lease) -> AsyncIterator[pb.KvEvent]:
        """The life of a lease as events; ends when it is released or finished."""
        is_admitted_sent = is_commit_sent = False
        num_ready_sent = 0
        while True:
            lease.changed.clear()
            if lease.state is LeaseState.FAILED:
                raise lease.error or HandoverError("the prefill failed")
            if lease.state is LeaseState.FINISHED:
                reason = codec.finish_to_pb(lease.finish_reason)
                yield pb.KvEvent(finished=pb.KvFinished(finish_reason=reason))
                return
            if lease.state is LeaseState.RELEASED:
                return
            if lease.block_ids is not None and not is_admitted_sent:
                is_admitted_sent = True
                yield pb.KvEvent(admitted=pb.KvAdmitted(block_ids=lease.block_ids))
            elif lease.num_ready_blocks > num_ready_sent:
                num_ready_sent = lease.num_ready_blocks
                yield pb.KvEvent(ready=pb.KvReady(num_ready_blocks=num_ready_sent))
            elif lease.state is LeaseState.COMMITTED and not is_commit_sent:
                is_commit_sent = True
                yield pb.KvEvent(commit=_commit_record(lease))
            else:
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
            if lease is None or not lease.is_attached or lease.block_ids is None:
                raise HandoverError(f"attempt {request.request_id} holds no blocks here")
            final = set(lease.block_ids[: lease.num_ready_blocks])
            if not final.issuperset(request.block_ids):
                raise HandoverError(f"attempt {request.request_id}: blocks asked for are not its")
            async for piece in stream_blocks(self._runtime.engine.kv_cache, request.block_ids):
                if lease.state.is_terminal:  # the blocks may be somebody else's by now
                    raise lease.error or HandoverError("the lease has ended")
                await context.write(piece)


def _commit_record(lease: Lease) -> pb.KvCommit:
    assert lease.first_token is not None
    return pb.KvCommit(
        num_tokens=lease.num_tokens,
        token_digest=lease.token_digest,
        block_checksums=lease.checksums,
        first_token=codec.token_to_pb(lease.first_token, lease.first_logprobs),
    )
