"""Chooses the workers of one attempt."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from core.errors import UnavailableError
from core.types import Role
from router.policy import Demand, Policy, cheapest
from router.registry import Registry
from router.worker import Worker

# A breaker lets a probe through by time alone: look again, even if nothing was reported.
_RECHECK_S = 0.25


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode side prefills for itself."""

    prefill: Worker | None
    decode: Worker

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Placer:
    """Applies one policy to the registry's ready workers."""

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self._registry = registry
        self._policy = policy

    async def place(
        self,
        demand: Demand,
        hashes: Sequence[bytes],
        avoid: Collection[str] = (),
        wait_s: float = 0.0,
    ) -> Placement:
        """Places a request. `avoid` holds incarnations that failed it: one of them is chosen only
        if there is no other. Waits up to `wait_s` for a worker. Raises UnavailableError."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    placement = self._try(demand, hashes, avoid)
                    if placement is not None:
                        return placement
                    await self._registry.wait_for_change(_RECHECK_S)
        except TimeoutError:
            raise UnavailableError(self._what_is_missing()) from None

    def _try(
        self, demand: Demand, hashes: Sequence[bytes], avoid: Collection[str]
    ) -> Placement | None:
        sides = [_willing(self._registry.ready(role)) for role in self._registry.roles]
        if not all(sides):
            return None
        if len(sides) == 1:
            workers = _prefer_others(sides[0], avoid)
            return Placement(None, cheapest(workers, self._policy.colocated, demand, hashes)[1])
        prefills, decodes = sides
        best: tuple[float, Worker, Worker] | None = None
        for kin in _by_compatibility(prefills):
            partners = [d for d in decodes if self._registry.can_pair(kin[0], d)]
            if not partners:
                continue
            choice = self._cheapest(
                _prefer_others(kin, avoid), _prefer_others(partners, avoid), demand, hashes
            )
            tainted = sum(worker.incarnation in avoid for worker in choice[1:])
            # A pair without a failed worker goes before any cost.
            choice = (choice[0] + tainted * 1e12, choice[1], choice[2])
            if best is None or choice[0] < best[0]:
                best = choice
        return None if best is None else Placement(best[1], best[2])

    def _cheapest(
        self,
        prefills: list[Worker],
        decodes: list[Worker],
        demand: Demand,
        hashes: Sequence[bytes],
    ) -> tuple[float, Worker, Worker]:
        prefill_cost, prefill = cheapest(prefills, self._policy.prefill, demand, hashes)
        decode_cost, decode = cheapest(decodes, self._policy.decode, demand, hashes)
        return prefill_cost + decode_cost, prefill, decode

    def _what_is_missing(self) -> str:
        for role in self._registry.roles:
            if not self._registry.ready(role):
                return f"no {Role(role).value} worker is ready"
        return "no pair of workers can take a request now"


def _willing(workers: list[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.breaker.allows()]


def _prefer_others(workers: list[Worker], avoid: Collection[str]) -> list[Worker]:
    return [worker for worker in workers if worker.incarnation not in avoid] or workers


def _by_compatibility(workers: list[Worker]) -> list[list[Worker]]:
    def key(worker: Worker) -> list[tuple[str, str]]:
        assert worker.info is not None
        return sorted(worker.info.compatibility.items())

    return [list(group) for _, group in groupby(sorted(workers, key=key), key)]
