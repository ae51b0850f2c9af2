"""From `pdserve up` and `down` to the controller of a deployment: found in Ray by its name, or
started. Needs a connected Ray; everything here blocks."""

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.controller_actor import ControllerActor, ControllerSpec, Facts
from cluster.lives import NAMESPACE, controller_name, end_lives_now
from core.errors import UnavailableError

_START_S = 90.0
_POLL_S = 0.2


def attach(spec: ControllerSpec) -> tuple[Facts, bool]:
    """The controller of the deployment, and whether it was there already: then it goes on with
    what it was told, whatever `spec` says. It runs on this node, where routers look for it again
    after its death. Raises UnavailableError if it cannot start, or does not answer."""
    name = controller_name(spec.options.deployment)
    deadline = time.monotonic() + _START_S
    while True:
        controller = _find(name)
        is_found = controller is not None
        if controller is None:
            controller = _create(name, spec)
        try:
            facts: Facts = ray.get(
                controller.facts.remote(), timeout=max(1.0, deadline - time.monotonic())
            )
        except ray.exceptions.RayError as error:
            if not is_found:
                ray.kill(controller, no_restart=True)
            elif time.monotonic() < deadline:  # it was about to end
                time.sleep(_POLL_S)
                continue
            raise UnavailableError(
                f"the controller does not answer: {_first_line(error)}"
            ) from error
        if facts.error:
            ray.kill(controller, no_restart=True)
            raise UnavailableError(facts.error)
        if not facts.is_ending:
            return facts, is_found
        if time.monotonic() > deadline:
            raise UnavailableError(f"{name} is being ended and takes long; try again later")
        time.sleep(_POLL_S)


def end_deployment(deployment: str) -> None:
    """Ends the controller and all workers without asking them. For a deployment whose controller
    does not answer."""
    controller = _find(controller_name(deployment))
    if controller is not None:
        ray.kill(controller, no_restart=True)
    end_lives_now(deployment)


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _create(name: str, spec: ControllerSpec) -> Any:
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(ControllerActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(spec)
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
