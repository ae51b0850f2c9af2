"""From `pdserve up` and `down` to the controller of a deployment: found in Ray by its name, or
started. Needs a connected Ray; everything here blocks."""

import time
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actor_process import node_address
from cluster.addresses import reached_at
from cluster.controller_actor import ControllerActor, ControllerSpec, Facts
from cluster.lives import NAMESPACE, controller_name, end_lives_now
from core.errors import UnavailableError

_START_S = 90.0
_POLL_S = 0.2


def attach(spec: ControllerSpec) -> tuple[Facts, bool]:
    """The controller of the deployment, and whether it was there already: then it goes on with
    what it was told, whatever `spec` says. It runs on this node, where routers look for it again
    after its death; when this node is lost, on another one, unless this is the head's: that is lost
    with the head, and found again where the next `attach` is. The facts' address is one for this
    machine. Raises UnavailableError if it cannot start, does not answer, or cannot be reached."""
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
            return _seen_from_here(facts), is_found
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
    # Ray's own mark. A loss of its node is no reason to go elsewhere: it comes back with the head.
    is_head = any(
        node["NodeID"] == here and "node:__internal_head__" in node["Resources"]
        for node in ray.nodes()
    )
    return (
        ray.remote(ControllerActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            memory=1,  # an actor that wants nothing goes anywhere, whatever a soft affinity says
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=not is_head),
        )
        .remote(spec)
    )


def _seen_from_here(facts: Facts) -> Facts:
    if facts.node == node_address():
        return facts
    address = reached_at(facts.address, facts.node)
    if not address:
        raise UnavailableError(
            f"the deployment's controller runs on {facts.node}, where it listens at "
            f"{facts.address} alone; run this there, or end it there and give it --bind"
        )
    return replace(facts, address=address)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
