"""`pdserve down`: ends a running `pdserve up`."""

import asyncio
import contextlib
import os
import signal
import time

import grpc

from cli.state import Deployment
from cluster.process_tree import descendants, end_all
from rpc import cluster_pb2, cluster_pb2_grpc
from rpc.channel import make_channel

_ASK_S = 5.0
_STOP_S = 60.0  # graces of router and workers, then Ray's own end
_TERM_S = 20.0
_POLL_S = 0.1


def stop_deployment(deployment: Deployment) -> bool:
    """Asks the controller, then the process, then nobody. Returns True if it ended by itself;
    False if it had to be killed with all that it had started."""
    asked = asyncio.run(_ask(deployment))
    if asked and _ended(deployment, _STOP_S):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(deployment.pid, signal.SIGTERM)
    if _ended(deployment, _TERM_S):
        return True
    end_all([deployment.process, *descendants(deployment.pid)], patience_s=0.0)
    return False


async def _ask(deployment: Deployment) -> bool:
    async with make_channel(
        deployment.controller, deployment.token, deployment.tls_files
    ) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        try:
            await stub.Shutdown(cluster_pb2.ShutdownRequest(), timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return False
    return True


def _ended(deployment: Deployment, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while deployment.process.is_alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
