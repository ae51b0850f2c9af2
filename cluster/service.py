"""ClusterService: what routers and the command line ask the controller for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Protocol

import grpc

from cluster.changes import Change, ChangeKind, as_yaml, changes_between
from cluster.load_watch import QueueWatch
from cluster.operations import Operations, Say
from cluster.view import ViewPublisher
from core.config import Config, parse_config
from core.errors import ConfigError, PdserveError, RequestError
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc, codec
from rpc import worker_pb2 as worker_pb
from rpc.status import translated_errors

_KINDS = {
    ChangeKind.SCALE: pb.CHANGE_KIND_SCALE,
    ChangeKind.ROLLOUT: pb.CHANGE_KIND_ROLLOUT,
    ChangeKind.RESTART: pb.CHANGE_KIND_RESTART,
}


class Controlled(Protocol):
    config: Config
    publisher: ViewPublisher
    shutdown_requested: asyncio.Event
    stopped: asyncio.Event
    operations: Operations
    queues: QueueWatch

    async def wait_ready(self) -> None: ...


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Watch for routers, the rest for people. Shutdown asks the owner of the controller, and is
    answered when all workers are gone."""

    def __init__(self, controller: Controlled) -> None:
        self._controller = controller
        self._operations = controller.operations

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ClusterView]:
        async with translated_errors(context):
            async for view in self._controller.publisher.watch():
                yield view

    async def ReportQueue(
        self, request: pb.QueueReport, context: grpc.aio.ServicerContext
    ) -> pb.QueueReportResponse:
        self._controller.queues.note(request)
        return pb.QueueReportResponse()

    async def Shutdown(
        self, request: pb.ShutdownRequest, context: grpc.aio.ServicerContext
    ) -> pb.ShutdownResponse:
        self._controller.publisher.end()
        self._controller.shutdown_requested.set()
        await self._controller.stopped.wait()
        return pb.ShutdownResponse()

    async def WaitReady(
        self, request: pb.WaitReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.WaitReadyResponse:
        try:
            await self._controller.wait_ready()
        except PdserveError as error:
            return pb.WaitReadyResponse(error=error.message)
        return pb.WaitReadyResponse()

    async def Apply(
        self, request: pb.ApplyRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OperationEvent]:
        async with translated_errors(context):
            try:
                new = parse_config(request.config_yaml, list(request.overrides))
            except ConfigError as error:
                raise RequestError(error.message) from error
            changes = changes_between(self._controller.config, new)
            yield pb.OperationEvent(changes=[_to_pb(change) for change in changes])
            if not request.dry_run:
                async for event in self._told(
                    "an apply", lambda say: self._operations.apply(new, changes, say)
                ):
                    yield event

    async def Scale(
        self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OperationEvent]:
        async with translated_errors(context):
            replicas = dict(request.replicas)
            self._refuse_if_autoscaled(replicas)
            async for event in self._told(
                "a scaling", lambda say: self._operations.scale(replicas, say)
            ):
                yield event

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OperationEvent]:
        async with translated_errors(context):
            grace_s = _grace_of(request)
            async for event in self._told(
                f"a drain of {request.worker_id}",
                lambda say: self._operations.drain(request.worker_id, say, grace_s),
            ):
                yield event

    async def SwitchWorker(
        self, request: pb.SwitchWorkerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OperationEvent]:
        async with translated_errors(context):
            grace_s = _grace_of(request)
            if request.role not in (worker_pb.ROLE_PREFILL, worker_pb.ROLE_DECODE):
                raise RequestError("role: expected prefill or decode")
            self._refuse_if_autoscaled(("prefill", "decode"))
            pool = codec.role_from_pb(request.role).value
            async for event in self._told(
                f"a switch of {request.worker_id}",
                lambda say: self._operations.switch(request.worker_id, pool, say, grace_s),
            ):
                yield event

    async def Rollout(
        self, request: pb.RolloutRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OperationEvent]:
        async with translated_errors(context):
            pools = list(request.pools)
            async for event in self._told(
                "a rollout", lambda say: self._operations.rollout(pools, say)
            ):
                yield event

    def _refuse_if_autoscaled(self, pools: Iterable[str]) -> None:
        config = self._controller.config
        for pool in sorted(set(pools) & set(config.active_pools)):
            if config.pools.named(pool).autoscale is not None:
                raise RequestError(
                    f"{pool} scales itself; change pools.{pool}.autoscale in the file and apply it"
                )

    async def _told(
        self, name: str, operation: Callable[[Say], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[pb.OperationEvent]:
        """Runs an operation and yields what it says; raises what it raises. A caller that leaves
        leaves the operation running."""
        said: asyncio.Queue[str | None] = asyncio.Queue()
        task = self._operations.begin(name, operation(said.put_nowait))
        task.add_done_callback(lambda _: said.put_nowait(None))
        while (text := await said.get()) is not None:
            yield pb.OperationEvent(text=text)
        await asyncio.shield(task)


def _grace_of(request: pb.DrainWorkerRequest | pb.SwitchWorkerRequest) -> float | None:
    if not request.HasField("grace_seconds"):
        return None
    if not 0 <= request.grace_seconds <= 3600:
        raise RequestError(f"grace_seconds: expected 0 to 3600, got {request.grace_seconds:g}")
    return request.grace_seconds


def _to_pb(change: Change) -> pb.Change:
    return pb.Change(
        key=change.key,
        before=as_yaml(change.before),
        after=as_yaml(change.after),
        kind=_KINDS[change.kind],
    )
