"""The controller of a running deployment, as the command talks to it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from cli.state import find_deployment
from cli.terminal import Reporter
from core.errors import DeadlineError, PdserveError, UnavailableError
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc
from rpc.channel import make_channel
from rpc.status import error_from_rpc
from rpc.tls import TlsFiles

_PLAN_S = 10.0
_BUSY_S = 1.0
_SILENCE_S = 15.0  # its views come every 5 s


@dataclass(frozen=True, slots=True)
class Target:
    """A controller. `token` None: the one of this process's environment."""

    address: str
    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None  # None: as token


def find_controller(address: str | None) -> Target:
    """The address given, or that of the deployment that runs here."""
    if address is not None:
        return Target(address)
    deployment = find_deployment(None)
    if deployment is None:
        raise UnavailableError(
            "nothing runs here; name a controller elsewhere with --controller HOST:PORT"
        )
    return Target(deployment.controller, deployment.token, deployment.tls_files)


@asynccontextmanager
async def controller(target: Target) -> AsyncIterator[cluster_pb2_grpc.ClusterServiceStub]:
    """Its service. Failures of calls in the block are raised as PdserveErrors, and DeadlineError
    when it has gone silent: however long an operation takes, its views come meanwhile."""
    async with make_channel(target.address, target.token, target.tls) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        try:
            async with asyncio.timeout(_SILENCE_S) as silence:
                listening = asyncio.create_task(_put_off(silence, stub))
                try:
                    yield stub
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        except TimeoutError as error:
            raise DeadlineError(
                f"the controller at {target.address} has not answered for {_SILENCE_S:g} s; "
                "requests go on without it, and it is started again if it hangs: try again"
            ) from error
        except grpc.aio.AioRpcError as error:
            told = error_from_rpc(error, "")
            said = (error.details() or error.code().name).removeprefix(": ")
            if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in said:
                said = f"no controller answers at {target.address}"
            raise type(told)(said) from error


async def _put_off(silence: asyncio.Timeout, stub: cluster_pb2_grpc.ClusterServiceStub) -> None:
    """Until the views end."""
    async for _ in stub.Watch(pb.WatchRequest(router_id="pdserve")):
        silence.reschedule(asyncio.get_running_loop().time() + _SILENCE_S)


def run_operation(
    target: Target,
    call: Callable[[cluster_pb2_grpc.ClusterServiceStub], AsyncIterator[pb.OperationEvent]],
    reporter: Reporter,
) -> bool:
    """Tells what the operation says, until it has ended; returns whether it said anything. Ctrl-C
    ends the telling alone."""

    async def run() -> bool:
        has_said = False
        async with controller(target) as stub:
            async for event in call(stub):
                if event.text:
                    has_said = True
                    reporter.done(event.text)
        return has_said

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        reporter.warn("the operation goes on without you; `pdserve status` shows where it is")
        raise


def drain_host(target: Target, host: str, grace_s: float, reporter: Reporter) -> None:
    """Drains every worker of one host, and returns when they are gone: what takes their place is
    the controller's business. Waits while another operation runs, for at most the grace."""

    async def run() -> None:
        async with controller(target) as stub:
            view = await stub.Watch(pb.WatchRequest()).read()
            for worker in view.workers:
                if host in (worker.host, worker.address.rpartition(":")[0]):
                    await _drain_one(stub, worker.id, grace_s, reporter)

    asyncio.run(run())


async def _drain_one(
    stub: cluster_pb2_grpc.ClusterServiceStub, worker_id: str, grace_s: float, reporter: Reporter
) -> None:
    request = pb.DrainWorkerRequest(worker_id=worker_id, grace_seconds=grace_s)
    deadline = time.monotonic() + grace_s
    while True:
        try:
            async for event in stub.DrainWorker(request):
                reporter.done(event.text)
                if event.text.startswith(f"{worker_id} is gone"):
                    return
            return
        except grpc.aio.AioRpcError as error:
            is_busy = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if not is_busy or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_BUSY_S)


def planned_changes(target: Target, config_yaml: str, overrides: list[str]) -> list[pb.Change]:
    """What an apply would change."""
    request = pb.ApplyRequest(config_yaml=config_yaml, overrides=overrides, dry_run=True)

    async def ask() -> list[pb.Change]:
        async with controller(target) as stub:
            found: list[pb.Change] = []
            async for event in stub.Apply(request, timeout=_PLAN_S):
                found += event.changes
            return found

    return asyncio.run(ask())


def parse_replicas(wishes: list[str]) -> dict[str, int]:
    """["prefill=3", "decode=2"] -> numbers by pool."""
    replicas = {}
    for wish in wishes:
        pool, _, number = wish.partition("=")
        if not pool or not (number.isascii() and number.isdigit()):
            raise PdserveError(f"{wish}: expected POOL=NUMBER, for example prefill=3")
        replicas[pool] = int(number)
    return replicas
