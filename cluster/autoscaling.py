"""Moves the pools to what their autoscalers want."""

import asyncio
import logging
import time
from typing import Protocol

from cluster.autoscaler import Asked, Autoscaler, PoolLoad, decide_together
from cluster.operations import Fleet, Operations
from core.config import AutoscaleConfig
from core.errors import OverloadedError, PdserveError

logger = logging.getLogger(__name__)

PERIOD_S = 2.0


class Loads(Protocol):
    def start(self) -> None:
        """Begins to watch, unless it does already."""

    def load(self, pool: str) -> PoolLoad:
        """What happened in a pool since the last call for it."""


class Autoscaling:
    """Asks every pool that has `autoscale` once a period; a worker that may change its role moves
    from one to the other instead of an end here and a start there. One operation at a time. What
    a person does comes first: while it runs nothing is asked for."""

    def __init__(
        self,
        fleet: Fleet,
        operations: Operations,
        loads: Loads,
        period_s: float = PERIOD_S,
    ) -> None:
        self._fleet, self._operations, self._loads = fleet, operations, loads
        self._period_s = period_s
        self._scalers: dict[str, tuple[AutoscaleConfig, Autoscaler]] = {}
        self._said = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            asked = {
                pool: ask
                for pool in self._fleet.config.active_pools
                if (ask := self._ask(pool)) is not None
            }
            changes = decide_together(time.monotonic(), asked, self._num_movable)
            if not changes:
                continue
            for pool, decision in changes.items():
                present = asked[pool].present
                self._say(f"{pool}: {present} -> {decision.replicas} workers: {decision.reason}")
            try:
                sizes = {pool: decision.replicas for pool, decision in changes.items()}
                name = f"autoscaling of {' and '.join(sizes)}"
                # A start may take minutes, in which the other pool has its own needs.
                work = self._operations.scale(sizes, self._say, waits_for_ready=False)
                # Shielded: the operation has its own end, as if a person had asked.
                await asyncio.shield(self._operations.begin(name, work))
            except OverloadedError:  # an operation is under way
                continue
            except PdserveError as error:
                self._say(f"{', '.join(changes)}: cannot change the size: {error.message}")

    def _ask(self, pool: str) -> Asked | None:
        """None for a pool that does not scale itself, or whose workers are not there yet."""
        section = self._fleet.config.pools.named(pool)
        config = section.autoscale
        if config is None:
            self._scalers.pop(pool, None)
            return None
        known = self._scalers.get(pool)
        if known is None or known[0] != config:
            scaler = Autoscaler(config, pool != "decode", pool != "prefill")
            known = self._scalers[pool] = (config, scaler)
        self._loads.start()
        load = self._loads.load(pool)
        if not load.workers:
            return None  # nobody to ask; the slots are bringing them up
        return Asked(known[1], section.replicas, load)

    def _num_movable(self, source: str, target: str) -> int:
        return sum(slot.can_become(target) for slot in self._fleet.workers(source))

    def _say(self, text: str) -> None:
        if text != self._said:  # what does not fit now does not fit every two seconds
            logger.info("autoscaling: %s", text)
        self._said = text
