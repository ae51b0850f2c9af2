"""The lives of workers as Ray has them, and how a controller that has come back finds them.

A life is a placement group and an actor for each rank. All bear one name that is never used
again, `pdserve:DEPLOYMENT:WORKER:LIFE` (further ranks with `:rank1` and so on behind it), and are
detached: they outlive the controller that made them. So whatever is there under the deployment's
name is either a life to be found again, or what is left of one, to be removed.
"""

import asyncio
import contextlib
import logging
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util import list_named_actors, placement_group_table
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group

from cluster.worker_actor import Description
from core.worker_settings import WorkerSettings
from rpc import codec
from rpc import worker_pb2 as worker_pb

logger = logging.getLogger(__name__)

NAMESPACE = "pdserve"
# A worker that imports torch just now does not answer.
_DESCRIBE_S = 30.0


@dataclass(frozen=True, slots=True)
class Life:
    """One that was found: all of its ranks are there, and its start has begun."""

    actors: list[Any]  # by rank
    group: PlacementGroup
    settings: WorkerSettings  # of rank 0, with the role that it has now
    info: bytes  # a serialized WorkerInfo; b"" while it starts
    is_draining: bool
    wanted: str  # the wanted state, as the last controller left it there


@dataclass(slots=True)
class _Remains:
    """What bears the name of one life."""

    actors: dict[int, Any] = field(default_factory=dict)
    group: PlacementGroup | None = None


def controller_name(deployment: str) -> str:
    return f"pdserve:{deployment}"


def new_life_name(deployment: str, worker_id: str) -> str:
    return f"{controller_name(deployment)}:{worker_id}:{uuid.uuid4().hex[:8]}"


async def find_lives(deployment: str) -> list[Life]:
    """Those that go on without a controller, one for each worker id, by their numbers. What is
    there besides is ended: groups whose actor has died, actors that do not answer or were not
    started yet."""
    remains = await asyncio.to_thread(_look, deployment)
    found = dict(zip(remains, await asyncio.gather(*map(_whole, remains.values())), strict=True))
    lives: dict[str, Life] = {}
    for name, life in found.items():
        if life is not None and lives.setdefault(life.settings.worker_id, life) is life:
            continue
        logger.info("removing what is left of %s", name)
        await asyncio.to_thread(_end, remains[name])
    return [lives[name] for name in sorted(lives, key=lambda name: (len(name), name))]


async def end_lives(deployment: str) -> None:
    """Ends whatever is there."""
    await asyncio.to_thread(end_lives_now, deployment)


def end_lives_now(deployment: str) -> None:
    for remains in _look(deployment).values():
        _end(remains)


def _look(deployment: str) -> dict[str, _Remains]:
    prefix = f"{controller_name(deployment)}:"
    found: dict[str, _Remains] = {}
    for entry in list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix):
            name, _, rank = entry["name"].partition(":rank")
            with contextlib.suppress(ValueError):  # it has just died
                actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
                found.setdefault(name, _Remains()).actors[int(rank or 0)] = actor
    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                found.setdefault(entry["name"], _Remains()).group = get_placement_group(
                    entry["name"]
                )
    return found


async def _whole(remains: _Remains) -> Life | None:
    """The life, if nothing of it is missing."""
    if remains.group is None or 0 not in remains.actors:
        return None
    asked = [_described(remains.actors[rank]) for rank in sorted(remains.actors)]
    told = [description for description in await asyncio.gather(*asked) if description]
    begun = [description.settings for description in told if description.settings]
    if not begun or not len(begun) == len(remains.actors) == begun[0].num_ranks:
        return None
    settings, info = replace(begun[0], rendezvous=""), told[0].info
    if info:
        role = codec.role_from_pb(worker_pb.WorkerInfo.FromString(info).role)
        settings = replace(settings, role=role)
    actors = [remains.actors[rank] for rank in sorted(remains.actors)]
    return Life(actors, remains.group, settings, info, told[0].is_draining, told[0].wanted)


async def _described(actor: Any) -> Description | None:
    with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
        async with asyncio.timeout(_DESCRIBE_S):
            description: Description = await actor.describe.remote()
            return description
    return None


def _end(remains: _Remains) -> None:
    for actor in remains.actors.values():
        ray.kill(actor)
    if remains.group is not None:
        remove_placement_group(remains.group)
