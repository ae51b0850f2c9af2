"""`pdserve down`: ends a running deployment."""

import asyncio
import contextlib
import os
import signal
import time

from cli.control import Target, controller
from cli.state import Deployment, deployment_name, forget
from cluster.process_tree import descendants, end_all
from core.config import parse_config
from core.errors import PdserveError, UnavailableError
from rpc import cluster_pb2

_STOP_S = 60.0  # graces of router and workers, then Ray's own end
_ASK_S = 30.0  # a controller that has just died, or is killed because it hangs, is back by then
_ASK_EVERY_S = 0.5
_POLL_S = 0.1


def stop_deployment(deployment: Deployment) -> bool:
    """Asks its `pdserve up`; where that is gone, on somebody else's cluster, the controller; and
    then nobody. Returns True if it ended by itself; False if it had to be killed with all that
    belongs to it. Raises UnavailableError if nobody can be reached."""
    if deployment.process.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(deployment.pid, signal.SIGTERM)
        if _ended(deployment, _STOP_S):
            return True
        end_all([deployment.process, *descendants(deployment.pid)], patience_s=0.0)
        if deployment.ray is None:
            return False
    has_ended = asyncio.run(_ask(deployment))
    if not has_ended:
        _kill_on_cluster(deployment)
    forget(deployment)
    return has_ended


async def _ask(deployment: Deployment) -> bool:
    """Whether the controller says that all workers are gone."""
    deadline = time.monotonic() + _ASK_S
    target = Target(deployment.controller, deployment.token, deployment.tls_files)
    while time.monotonic() < deadline:
        with contextlib.suppress(PdserveError):
            async with controller(target) as stub:
                await stub.Shutdown(cluster_pb2.ShutdownRequest(), timeout=_STOP_S)
                return True
        await asyncio.sleep(_ASK_EVERY_S)
    return False


def _kill_on_cluster(deployment: Deployment) -> None:
    from cluster.attach import end_deployment  # imports ray
    from cluster.ray_session import ray_session

    config = parse_config(f"model: none\nray: {{address: {deployment.ray!r}}}")
    try:
        with ray_session(config):
            end_deployment(deployment_name(deployment.http))
    except UnavailableError as error:
        forget(deployment)
        raise UnavailableError(
            f"its controller does not answer, {error.message}; forgotten here"
        ) from error


def _ended(deployment: Deployment, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while deployment.process.is_alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
