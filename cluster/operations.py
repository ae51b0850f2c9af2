"""Changes of a running deployment: apply, scale, switch, drain, rollout.

    rollout, for each worker:  start a new one -> ready and still so a moment later -> drain the old
    no room for one more:      drain the old one -> start a new one in its place
    the new one is not well:   end it, put back what was replaced so far, say so

No operation loses a request: routers place nothing on a worker that drains, what runs there has
its grace, and what is left then is resumed elsewhere by the router.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from cluster import role_switch
from cluster.changes import Change, ChangeKind, as_yaml, changes_between
from cluster.worker_slot import WorkerSlot
from core.config import Config, PoolConfig
from core.errors import (
    DeadlineError,
    NotFoundError,
    OverloadedError,
    PdserveError,
    RequestError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

MAX_REPLICAS = 1024
Say = Callable[[str], None]


class Fleet(Protocol):
    """The workers of a deployment, as operations see them."""

    config: Config

    def workers(self, pool: str) -> list[WorkerSlot]: ...

    def add(self, pool: str, config: Config, is_trial: bool) -> WorkerSlot:
        """Begins to start one more worker. Raises RequestError if it cannot fit."""

    async def has_room(self, pool: str, config: Config) -> bool:
        """Whether one more worker has a place now."""

    async def remove(self, slot: WorkerSlot, grace_s: float) -> bool:
        """Drains and ends a worker. False if something ran on when the grace was over."""


class Operations:
    """Runs one operation at a time, each to its end, whether or not its caller stays."""

    def __init__(self, fleet: Fleet, drain_grace_s: float, settle_s: float) -> None:
        self._fleet = fleet
        self._grace_s = drain_grace_s
        self._settle_s = settle_s
        self._running: asyncio.Task[None] | None = None

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Raises OverloadedError while another operation runs."""
        if self._running is not None and not self._running.done():
            work.close()
            raise OverloadedError(f"{self._running.get_name()} is under way; try again afterwards")
        self._running = asyncio.create_task(work, name=name)
        self._running.add_done_callback(_note_end)
        return self._running

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    # ------------------------------------------------------------ the operations

    async def apply(self, new: Config, changes: Sequence[Change], say: Say) -> None:
        """Raises RequestError, before anything is changed, if one of the changes is not possible
        live."""
        refused = [c for c in changes if c.kind is ChangeKind.RESTART]
        if refused:
            keys = ", ".join(
                f"{c.key} ({as_yaml(c.before)} -> {as_yaml(c.after)})" for c in refused
            )
            raise RequestError(
                f"cannot change while the deployment runs: {keys}; end it and start it again"
            )
        if not changes:
            say("nothing to change")
        # Where the file left a port open, the one that was found stays.
        new = new.model_copy(update={"router": self._fleet.config.router})
        pools = sorted({p for c in changes if c.kind is ChangeKind.ROLLOUT for p in c.pools})
        # First the rollout, with the sizes of now: a new setting that is not healthy ends it here.
        if pools:
            sizes = {pool: self._pool(pool).replicas for pool in new.active_pools}
            await self.rollout(pools, say, resized(new, sizes))
        wanted = {p: self._wanted(new, p) for p in new.active_pools}
        self._fleet.config = resized(new, {p: self._pool(p).replicas for p in new.active_pools})
        await self.scale(wanted, say)

    def _wanted(self, new: Config, pool: str) -> int:
        """A pool that scales itself keeps its size, within its bounds."""
        autoscale = new.pools.named(pool).autoscale
        if autoscale is not None:
            return autoscale.bounded(self._pool(pool).replicas)
        return new.pools.named(pool).replicas

    async def scale(
        self, replicas: Mapping[str, int], say: Say, waits_for_ready: bool = True
    ) -> None:
        """Returns when new workers are ready and surplus ones are gone."""
        for pool, wanted in replicas.items():
            self._check_pool(pool)
            if not 0 <= wanted <= MAX_REPLICAS:
                raise RequestError(f"{pool}={wanted}: expected 0 to {MAX_REPLICAS} workers")
        config = resized(self._fleet.config, replicas)
        await self._move_instead(replicas, say)
        grown: list[WorkerSlot] = []
        surplus: list[WorkerSlot] = []
        for pool, wanted in replicas.items():
            present = self._fleet.workers(pool)
            try:
                for _ in range(wanted - len(present)):
                    grown.append(self._fleet.add(pool, config, is_trial=False))
            except RequestError:  # what has been begun stays, and is what is wanted now
                now = {name: len(self._fleet.workers(name)) for name in replicas}
                self._fleet.config = resized(config, now)
                raise
            surplus += await least_missed(present, len(present) - wanted)
        self._fleet.config = config
        if grown:
            say(f"starting {_names(grown)}")
        if surplus:
            say(f"draining {_names(surplus)}")
        removing = asyncio.gather(*(self._remove(slot, say) for slot in surplus))
        try:
            for slot in grown if waits_for_ready else ():
                await _ready(slot)
                say(f"{slot.id} is ready")
        finally:
            await removing

    async def _move_instead(self, wanted: Mapping[str, int], say: Say) -> None:
        """Of workers that may change their role, as many as one pool has too many and another too
        few; those with the fewest requests."""
        workers = {pool: self._fleet.workers(pool) for pool in wanted}
        for source, target, count in role_switch.surplus_for_others(workers, wanted):
            able = [slot for slot in workers[source] if slot.can_become(target)]
            chosen = await least_missed(able, count)
            moved = await role_switch.try_moves(chosen, target, self._grace_s, say)
            self._note_moved(source, target, len(moved))

    def _note_moved(self, source: str, target: str, count: int) -> None:
        """It is what is wanted now, also if what comes next fails."""
        sizes = {source: self._pool(source).replicas - count}
        sizes[target] = self._pool(target).replicas + count
        self._fleet.config = resized(self._fleet.config, sizes)

    async def switch(
        self, worker_id: str, pool: str, say: Say, grace_s: float | None = None
    ) -> None:
        """Moves one worker to the other pool. Raises RequestError if it cannot, and
        UnavailableError if it was lost or stays what it was."""
        self._check_pool(pool)
        slot = self._find(worker_id)
        source = slot.pool
        role_switch.check(slot, pool, self._fleet.workers(source))
        await role_switch.move(slot, pool, self._grace_s if grace_s is None else grace_s, say)
        self._note_moved(source, pool, 1)

    async def drain(self, worker_id: str, say: Say, grace_s: float | None = None) -> None:
        """Replaces one worker. The last ready one of its pool goes only when the new one is
        there, if there is room for both."""
        slot = self._find(worker_id)
        config, pool = self._fleet.config, slot.pool
        others = [s for s in self._fleet.workers(pool) if s is not slot and s.is_ready]
        if not others and await self._fleet.has_room(pool, config):
            await self._start_new(pool, config, say)
            await self._remove(slot, say, grace_s)
            return
        say(f"draining {slot.id}")
        await self._remove(slot, say, grace_s)
        if len(self._fleet.workers(pool)) < getattr(config.pools, pool).replicas:
            await self._start_new(pool, config, say, is_trial=False)

    async def rollout(self, pools: Sequence[str], say: Say, new: Config | None = None) -> None:
        """Replaces every worker of the pools, with `new` as the configuration from then on.
        Raises UnavailableError after it has put back what was replaced."""
        old = self._fleet.config
        config = new or old
        for pool in pools:
            self._check_pool(pool)
        replaced: list[WorkerSlot] = []
        try:
            for pool in pools or config.active_pools:
                for slot in self._fleet.workers(pool):
                    await self._replace(slot, config, say, replaced)
        except PdserveError as error:
            say(f"not healthy: {error.message}")
            await self._roll_back(replaced, old, say)
            raise UnavailableError(
                f"rolled back, {error.message}; the workers are as they were"
            ) from error
        self._fleet.config = config

    async def reconcile(self, say: Say) -> None:
        """Of a controller that has found workers again: takes away those that are too many, and
        replaces those that are not as wanted. One that cannot be replaced stays."""
        config = self._fleet.config
        for pool in config.active_pools:
            surplus = len(self._fleet.workers(pool)) - self._pool(pool).replicas
            stale = [s for s in self._fleet.workers(pool) if _is_stale(s, config)]
            leaving = await least_missed(stale, min(surplus, len(stale)))
            await asyncio.gather(*(self._remove(slot, say) for slot in leaving))
            if surplus > len(leaving):
                await self.scale({pool: self._pool(pool).replicas}, say)
            for slot in stale:
                if slot in self._fleet.workers(pool):
                    await self._replace(slot, config, say, [])

    # ------------------------------------------------------------ steps

    async def _replace(
        self, slot: WorkerSlot, config: Config, say: Say, replaced: list[WorkerSlot]
    ) -> None:
        """A new worker for an old one. What has come is in `replaced`, also when this raises."""
        pool = slot.pool
        if await self._fleet.has_room(pool, config):
            replaced.append(await self._start_new(pool, config, say))
            await self._remove(slot, say)
            return
        say(f"no room for one more: draining {slot.id} first")
        old = self._fleet.config
        await self._remove(slot, say)
        try:
            replaced.append(await self._start_new(pool, config, say))
        except PdserveError:
            await self._start_new(pool, old, say, is_trial=False)
            raise

    async def _roll_back(self, replaced: list[WorkerSlot], old: Config, say: Say) -> None:
        for slot in replaced:
            if slot.settings.config == old:
                continue
            say(f"putting back a worker for {slot.id}")
            if await self._fleet.has_room(slot.pool, old):
                await self._start_new(slot.pool, old, say, is_trial=False)
                await self._remove(slot, say)
            else:
                await self._remove(slot, say)
                await self._start_new(slot.pool, old, say, is_trial=False)

    async def _start_new(
        self, pool: str, config: Config, say: Say, is_trial: bool = True
    ) -> WorkerSlot:
        """A worker that is ready and was still so a moment later. One on trial is taken away
        again when it is not."""
        slot = self._fleet.add(pool, config, is_trial)
        say(f"starting {slot.id}")
        try:
            await _ready(slot)
            if is_trial:
                await asyncio.sleep(self._settle_s)
                if not slot.is_ready:
                    raise UnavailableError(f"{slot.id} did not stay up")
        except PdserveError:
            if is_trial:
                await self._fleet.remove(slot, 0.0)
            raise
        say(f"{slot.id} is ready")
        return slot

    async def _remove(self, slot: WorkerSlot, say: Say, grace_s: float | None = None) -> None:
        is_quiet = await self._fleet.remove(slot, self._grace_s if grace_s is None else grace_s)
        rest = "" if is_quiet else "; what still ran there is resumed elsewhere"
        say(f"{slot.id} is gone{rest}")

    def _pool(self, pool: str) -> PoolConfig:
        found: PoolConfig = getattr(self._fleet.config.pools, pool)
        return found

    def _check_pool(self, pool: str) -> None:
        pools = self._fleet.config.active_pools
        if pool not in pools:
            raise RequestError(f"no pool {pool!r}; there is {' and '.join(pools)}")

    def _find(self, worker_id: str) -> WorkerSlot:
        every = [s for pool in self._fleet.config.active_pools for s in self._fleet.workers(pool)]
        for slot in every:
            if slot.id == worker_id:
                return slot
        raise NotFoundError(f"no worker {worker_id!r}; there is {_names(every) or 'none'}")


async def least_missed(slots: Sequence[WorkerSlot], count: int) -> list[WorkerSlot]:
    """The `count` workers to take away: those that are not ready first, then those with the
    fewest requests, then the youngest."""
    if count <= 0:
        return []
    loads = await asyncio.gather(*(slot.num_requests() for slot in slots))
    order = sorted(range(len(slots)), key=lambda i: (slots[i].is_ready, loads[i], -i))
    return [slots[i] for i in order[:count]]


def resized(config: Config, replicas: Mapping[str, int]) -> Config:
    """The configuration with other numbers of workers."""
    data = config.model_dump()
    for pool, count in replicas.items():
        data["pools"][pool]["replicas"] = count
    return Config.model_validate(data)


def _is_stale(slot: WorkerSlot, config: Config) -> bool:
    """Whether the worker was started with what would not be its settings now."""
    return any(
        change.kind is ChangeKind.RESTART or slot.pool in change.pools
        for change in changes_between(slot.settings.config, config)
        if change.kind is not ChangeKind.SCALE
    )


def _note_end(task: asyncio.Task[None]) -> None:
    """In the log too: nobody may be there to hear it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("%s ended: %s", task.get_name(), error)


async def _ready(slot: WorkerSlot) -> None:
    try:
        await asyncio.shield(slot.first_ready)
    except PdserveError as error:
        raise UnavailableError(f"{slot.id}: {error.message}") from error
    except asyncio.CancelledError:
        if slot.first_ready.cancelled():
            raise DeadlineError(f"{slot.id} was ended before it was ready") from None
        raise


def _names(slots: Sequence[WorkerSlot]) -> str:
    return ", ".join(slot.id for slot in slots)
