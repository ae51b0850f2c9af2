"""WorkerService: who this worker is and how loaded it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.status import translated_errors
from worker.runtime import WorkerRuntime

_MIN_SECONDS = 0.1
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
        """On change, at most every 100 ms; without one, every second as a sign of life."""
        last, waited = None, 0.0
        while True:
            status = self._runtime.status()
            if status != last or waited >= _MAX_SECONDS:
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

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        async with translated_errors(context):
            await self._runtime.drain()
        return pb.DrainResponse()


def add_status_service(runtime: WorkerRuntime) -> None:
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(StatusService(runtime), runtime.server)
