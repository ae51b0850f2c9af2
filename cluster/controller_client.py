"""The controller as its `pdserve up` talks to it: over gRPC, as routers do, so that neither side
needs Ray for it. While it is away it is waited for."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from core.errors import UnavailableError
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc
from rpc.channel import make_channel

_AGAIN_S = 0.3
_SILENCE_S = 15.0  # it says something every 5 s


class ControllerClient:
    """Owns a channel while it is entered. `locate`: asked while it is away where it may be now;
    "" is no answer."""

    def __init__(self, address: str, locate: Callable[[], Awaitable[str]] | None = None) -> None:
        self.address = address
        self._locate = locate
        self._open()

    def _open(self) -> None:
        self._channel = make_channel(self.address)
        self._stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)

    async def __aenter__(self) -> "ControllerClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def views(self) -> AsyncIterator[pb.ClusterView | None]:
        """Every view, and None when the controller was lost; for ever."""
        is_there = True
        while True:
            views = self._stub.Watch(pb.WatchRequest(router_id="pdserve up"))
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                while True:
                    async with asyncio.timeout(_SILENCE_S):
                        view = await views.read()
                    if view is grpc.aio.EOF:
                        break
                    is_there = True
                    yield view
            views.cancel()
            if is_there:
                is_there = False
                yield None
            await asyncio.sleep(_AGAIN_S)
            await self._look_elsewhere()

    async def _look_elsewhere(self) -> None:
        address = await self._locate() if self._locate is not None else ""
        if address and address != self.address:
            await self._channel.close()
            self.address = address
            self._open()

    async def wait_ready(self) -> None:
        """Returns when every worker has been ready once. Raises UnavailableError as soon as one
        cannot."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await self._stub.WaitReady(pb.WaitReadyRequest())
                if answer.error:
                    raise UnavailableError(answer.error)
                return
            await asyncio.sleep(_AGAIN_S)

    async def shutdown(self, patience_s: float) -> bool:
        """Ends all workers, then the controller. False if nobody said so within the patience."""
        deadline = time.monotonic() + patience_s
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.Shutdown(pb.ShutdownRequest(), timeout=left_s)
                return True
            await asyncio.sleep(_AGAIN_S)
        return False
