"""Reservations. Each worker has a placement group of its own, and nothing inside it reserves
again: two owners of one GPU would wait for each other for ever."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from core.errors import UnavailableError


class PlacementError(UnavailableError):
    """The cluster has not got what a worker needs; the message names it."""


@asynccontextmanager
async def reserved(
    bundle: dict[str, float],
    num_ranks: int,
    name: str,
    timeout_s: float,
    labels: Mapping[str, str] | None = None,
) -> AsyncIterator[PlacementGroup]:
    """Holds the resources of one worker on one node, a bundle for each of its ranks, and gives
    them back on the way out, which ends every process that runs on them. `labels`: of the node, in
    Ray's words. Raises PlacementError after `timeout_s`. When this process dies the reservation
    stays, by its name."""
    group = await asyncio.to_thread(
        placement_group,
        [bundle] * num_ranks,
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[dict(labels or {})] * num_ranks,
    )
    async with held(group):
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(group.wait, 1):
            if time.monotonic() >= deadline:
                raise PlacementError(
                    await asyncio.to_thread(_shortage, bundle, num_ranks, timeout_s, labels)
                )
        yield group


@asynccontextmanager
async def held(group: PlacementGroup) -> AsyncIterator[PlacementGroup]:
    """A reservation that exists, until it is given back on the way out."""
    try:
        yield group
    finally:
        await asyncio.to_thread(remove_placement_group, group)


def _shortage(
    bundle: dict[str, float], num_ranks: int, timeout_s: float, labels: Mapping[str, str] | None
) -> str:
    """Says which resources are missing, and whether they exist but are taken."""
    needed = {name: num_ranks * amount for name, amount in bundle.items()}
    total, free = ray.cluster_resources(), ray.available_resources()
    lacking = [
        f"{name} {amount:g} (the cluster has {total.get(name, 0):g}, {free.get(name, 0):g} free)"
        for name, amount in needed.items()
        if free.get(name, 0) < amount
    ]
    what = ", ".join(lacking) or f"{needed} on one node"
    if labels:
        what += f" on a node with {', '.join(f'{key}={value}' for key, value in labels.items())}"
    return f"no place for the worker after {timeout_s:g} s: it needs {what}"


def actor_options(
    bundle: dict[str, float], runtime_env: dict[str, Any] | None = None
) -> dict[str, object]:
    """The bundle, and what else the processes get, in the words of an actor's options."""
    other = dict(bundle)
    options: dict[str, object] = {
        "num_cpus": other.pop("CPU", 0),
        "num_gpus": other.pop("GPU", 0),
    }
    if "memory" in other:
        options["memory"] = other.pop("memory")
    if runtime_env:
        options["runtime_env"] = runtime_env
    return options | {"resources": other}
