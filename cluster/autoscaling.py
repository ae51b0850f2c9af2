"""Moves the pools to what their autoscalers want."""

import asyncio
import logging
import time
from typing import Protocol

from cluster.autoscaler import Autoscaler, PoolLoad
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
    """Asks every pool that has `autoscale` once a period, one change at a time. What an operation
    of a person does comes first: while it runs nothing is asked for."""

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
            for pool in self._fleet.config.active_pools:
                try:
                    await self._hold(pool)
                except OverloadedError:  # an operation is under way
                    break
                except PdserveError as error:
                    self._say(f"{pool}: cannot change its size: {error.message}")

    async def _hold(self, pool: str) -> None:
        config = self._fleet.config.pools.named(pool).autoscale
        if config is None:
            self._scalers.pop(pool, None)
            return
        known = self._scalers.get(pool)
        if known is None or known[0] != config:
            scaler = Autoscaler(config, pool != "decode", pool != "prefill")
            known = self._scalers[pool] = (config, scaler)
        self._loads.start()
        load = self._loads.load(pool)
        if not load.workers:
            return  # nobody to ask; the slots are bringing them up
        present = self._fleet.config.pools.named(pool).replicas
        decision = known[1].decide(time.monotonic(), present, load)
        if decision.replicas == present:
            return
        self._say(f"{pool}: {present} -> {decision.replicas} workers: {decision.reason}")
        work = self._operations.scale({pool: decision.replicas}, self._say)
        # Shielded: the operation has its own end, as if a person had asked.
        await asyncio.shield(self._operations.begin(f"autoscaling of {pool}", work))

    def _say(self, text: str) -> None:
        if text != self._said:  # what does not fit now does not fit every two seconds
            logger.info("autoscaling: %s", text)
        self._said = text
