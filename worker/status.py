"""WorkerService: who this worker is and how loaded it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.status import translated_errors
from worker.runtime import WorkerRuntime

_MIN_SECONDS = 0.1
# While sequences decode something counts up with every step, and a message costs worker and router
# as much as a step's tokens.
_COUNTED_SECONDS = 0.5
_MAX_SECONDS = 1.0


class StatusService(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerInfo:
        return self._runtime.info

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerStatus]:
        """When requests come or go, at most every 100 ms; when something else has changed, after
        half a second; else every second as a sign of life."""
        last, waited = pb.WorkerStatus(), _MAX_SECONDS
        while True:
            status = status_of(self._runtime)
            if (
                _requests(status) != _requests(last)
                or (status != last and waited >= _COUNTED_SECONDS)
                or waited >= _MAX_SECONDS
            ):
                yield status
                last, waited = status, 0.0
            await asyncio.sleep(_MIN_SECONDS)
            waited += _MIN_SECONDS

    async def WatchKvBlocks(
        self, request: pb.WatchKvBlocksRequest, context: grpc.aio.ServicerContext
    ) -> None:
        # Not a generator: a cancelled call must always arrive as CancelledError in here.
        async with translated_errors(context):
            self._runtime.check_incarnation(request.incarnation)
            async with aclosing(self._runtime.kv_events.messages()) as messages:
                async for message in messages:
                    await context.write(message)


def _requests(status: pb.WorkerStatus) -> tuple[Any, ...]:
    """What placement cannot do without."""
    return (
        status.state,
        status.requests_total,
        status.requests_running,
        status.requests_waiting,
        status.waiting_prefill_tokens,
        status.controller,
    )


def status_of(runtime: WorkerRuntime) -> pb.WorkerStatus:
    stats, blocks = runtime.snapshot
    speculative = runtime.settings.engine.speculative
    return pb.WorkerStatus(
        state=codec.state_to_pb(runtime.state),
        kv_blocks=codec.blocks_to_pb(blocks),
        requests_running=stats.requests_running,
        requests_waiting=stats.requests_waiting,
        waiting_prefill_tokens=stats.waiting_prefill_tokens,
        tokens_prefilled_total=stats.tokens_prefilled_total,
        tokens_decoded_total=stats.tokens_decoded_total,
        prefix_hit_tokens_total=stats.prefix_hit_tokens_total,
        preemptions_total=stats.preemptions_total,
        tokens_drafted_total=stats.tokens_drafted_total,
        tokens_draft_accepted_total=stats.tokens_draft_accepted_total,
        draft_pauses_total=stats.draft_pauses_total,
        speculative_method="" if speculative is None else speculative.method,
        kv_bytes_sent_total=runtime.kv_bytes_sent,
        kv_bytes_received_total=runtime.kv_bytes_received,
        transfers_ok_total=runtime.transfers_ok,
        transfers_failed_total=runtime.transfers_failed,
        transport=runtime.transport_in_use,
        aborts_total=runtime.aborts,
        requests_total=runtime.outputs.num_opened,
        controller=runtime.controller,
        rdma_fallbacks_total=runtime.carriers.num_fallbacks,
        seconds_since_progress=runtime.engine_loop.seconds_since_progress(),
        prefill_tokens_per_second=stats.prefill_tokens_per_second,
        decode_step_seconds=stats.decode_step_seconds,
        decode_sequence_seconds=stats.decode_sequence_seconds,
        links=[
            pb.LinkSpeed(peer_incarnation=peer, bytes_per_second=speed)
            for peer, speed in runtime.links.items()
        ],
    )


def add_status_service(runtime: WorkerRuntime) -> None:
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(StatusService(runtime), runtime.server)
