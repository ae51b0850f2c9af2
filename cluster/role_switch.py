"""Workers that move between the pools of prefill and decode, where their `roles` allow it.

A worker that moves drains, and is then one of the other pool within moments: no process ends, no
weights are read. So it is done instead of an end here and a start there, whoever asks for them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from cluster.worker_slot import WorkerSlot
from core.errors import PdserveError, RequestError

Say = Callable[[str], None]


async def move(slot: WorkerSlot, pool: str, grace_s: float, say: Say) -> None:
    """Raises UnavailableError; then the worker stays in its pool."""
    began, before = time.monotonic(), slot.pool
    say(f"{slot.id} becomes a {pool} worker")
    await slot.switch(pool, grace_s)
    seconds = time.monotonic() - began
    say(f"{slot.id} is a {pool} worker after {seconds:.2f} s, no more a {before} worker")


def check(slot: WorkerSlot, pool: str, peers: Sequence[WorkerSlot]) -> None:
    """Raises RequestError if a worker cannot move. `peers`: all workers of its pool."""
    if pool == slot.pool:
        raise RequestError(f"{slot.id} is a {pool} worker already")
    if pool not in slot.settings.roles:
        raise RequestError(
            f"{slot.id} cannot become a {pool} worker: its pool has no "
            "`roles: [prefill, decode]` in the file"
        )
    if not slot.is_ready:
        raise RequestError(f"{slot.id} is not ready")
    if not any(peer.is_ready for peer in peers if peer is not slot):
        raise RequestError(f"{slot.id} is the last ready {slot.pool} worker; start another first")


def surplus_for_others(
    workers: Mapping[str, Sequence[WorkerSlot]], wanted: Mapping[str, int]
) -> list[tuple[str, str, int]]:
    """From which pool to which how many workers may move on the way from the present numbers to
    the wanted ones. A pool keeps a ready worker that does not move, if it is to have any."""
    missing = {pool: count - len(workers[pool]) for pool, count in wanted.items()}
    moves = []
    for source, count in missing.items():
        for target in missing:
            able = sum(slot.can_become(target) for slot in workers[source])
            is_last = able == sum(slot.is_ready for slot in workers[source])
            most = min(-count, missing[target], able - (is_last and wanted[source] > 0))
            if most > 0:
                moves.append((source, target, most))
                missing[target] -= most
    return moves


async def try_moves(
    slots: Sequence[WorkerSlot], pool: str, grace_s: float, say: Say
) -> list[WorkerSlot]:
    """Together. Returns those that have moved; the others are what they were, and say why."""

    async def attempt(slot: WorkerSlot) -> bool:
        try:
            await move(slot, pool, grace_s, say)
        except PdserveError as error:
            say(error.message)
            return False
        return True

    have_moved = await asyncio.gather(*(attempt(slot) for slot in slots))
    return [slot for slot, has_moved in zip(slots, have_moved, strict=True) if has_moved]
