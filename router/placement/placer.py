"""Chooses the workers of one attempt."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from core.errors import UnavailableError
from core.types import Role
from router.placement.policy import (
    POLICIES,
    Demand,
    Load,
    Policy,
    Speeds,
    best_pair,
    best_worker,
    decode_seconds,
    hand_over_seconds,
    local_cost,
    own_prefill_seconds,
    prefill_cost,
    prefill_seconds,
    uncached,
)
from router.placement.registry import Registry
from router.placement.turnstile import Estimate
from router.placement.worker import Worker

# A breaker lets a probe through by time alone: look again, even if nothing was reported.
_RECHECK_S = 0.25
_PRIOR_BANDWIDTH = 1e9  # bytes/s, before any pull of a decode worker was measured


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode side prefills for itself."""

    prefill: Worker | None
    decode: Worker
    cached_tokens: int = 0  # of the prompt, where it is prefilled
    estimate: Estimate = Estimate()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Placer:
    """Applies one policy to the registry's ready workers.

    `max_local_tokens`: a decode worker may prefill a prompt itself if that is estimated faster
    and no more than so many prompt tokens, with those that it has to compute already, are not in
    its cache. 0: never.
    """

    def __init__(self, registry: Registry, policy: str, max_local_tokens: int = 0) -> None:
        self._registry = registry
        self._policy = policy
        self._max_local_tokens = max_local_tokens

    async def place(
        self,
        demand: Demand,
        names: Sequence[int],
        avoid: Collection[str] = (),
        wait_s: float = 0.0,
    ) -> Placement:
        """Places a request. `names` are of the prompt's full blocks. `avoid` holds incarnations
        that failed it: one of them is chosen only if there is no other. Waits up to `wait_s` for a
        worker. Raises UnavailableError."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    placement = self.look(demand, names, avoid)
                    if placement is not None:
                        return placement
                    await self._registry.wait_for_change(_RECHECK_S)
        except TimeoutError:
            raise UnavailableError(self._what_is_missing()) from None

    def look(
        self, demand: Demand, names: Sequence[int], avoid: Collection[str] = ()
    ) -> Placement | None:
        """Where the request would be placed now; None if nowhere."""
        sides = [_willing(self._registry.ready(role)) for role in self._registry.roles]
        if not all(sides):
            return None
        typical = _typical(sides)
        held = self._registry.prefixes.match(names)
        policy = POLICIES[self._policy]
        if not demand.session and self._policy == "session":
            policy = POLICIES["kv_aware"]

        def loads(workers: list[Worker]) -> list[tuple[Worker, Load]]:
            found = []
            for worker in _prefer_others(workers, avoid):
                cached = 0 if worker.holdings is None else held.get(worker.holdings, 0)
                found.append((worker, worker.load(cached, typical)))
            return found

        if len(sides) == 1:
            best = best_worker(loads(sides[0]), policy.colocated, demand)
            return _placed(None, best.worker, best.load, demand)
        prefills, decodes = sides
        choices = []
        for kin in _by_compatibility(prefills):
            partners = [d for d in decodes if self._registry.can_pair(kin[0], d)]
            if partners:
                choices.append(self._choose(loads(kin), loads(partners), policy, demand))
        # A choice without a worker that failed goes before any cost.
        return min(
            choices,
            key=lambda choice: (_tainted(choice[1], avoid), choice[0]),
            default=(0.0, None),
        )[1]

    def has_room(self) -> bool:
        """Whether a request that is placed now would begin soon. True if there is nobody to place
        it on: waiting longer is no help then."""
        sides = [self._registry.ready(role) for role in self._registry.roles]
        typical = _typical(sides)
        return all(not side or any(w.has_room(typical) for w in side) for side in sides)

    def _choose(
        self,
        ours: list[tuple[Worker, Load]],
        theirs: list[tuple[Worker, Load]],
        policy: Policy,
        demand: Demand,
    ) -> tuple[float, Placement]:
        """The best pair of two sides, or the decode worker that is better alone, and its cost."""
        cost, p, d = best_pair(ours, theirs, policy, demand, _bandwidth)
        pair = _placed(p.worker, d.worker, p.load, demand)
        most = self._max_local_tokens
        if not policy.is_in_seconds:
            theirs = [(d.worker, d.load)]
        able = [
            (worker, load)
            for worker, load in theirs
            if load.queued_tokens + uncached(load, demand) <= most
        ]
        if not able:
            return cost, pair
        alone = best_worker(able, local_cost, demand)
        together_s = (
            prefill_cost(p.load, demand)
            + decode_seconds(d.load, demand)
            + hand_over_seconds(p.load, d.load, demand, _bandwidth(p.worker, d.worker))
        )
        if alone.cost >= together_s:
            return cost, pair
        return cost + alone.cost - together_s, _placed(None, alone.worker, alone.load, demand)

    def _what_is_missing(self) -> str:
        for role in self._registry.roles:
            if not self._registry.ready(role):
                return f"no {Role(role).value} worker is ready"
        return "no pair of workers can take a request now"


def _placed(prefill: Worker | None, decode: Worker, load: Load, demand: Demand) -> Placement:
    """`load` is of the worker that prefills."""
    estimate = Estimate(num_tokens=uncached(load, demand))
    if (prefill or decode).prefill_speed is not None:
        own_s = own_prefill_seconds(load, demand)
        estimate = estimate._replace(queue_s=prefill_seconds(load, demand) - own_s, own_s=own_s)
    return Placement(prefill, decode, load.cached_tokens, estimate)


def _tainted(placement: Placement, avoid: Collection[str]) -> int:
    return sum(worker.incarnation in avoid for worker in placement.workers)


def _bandwidth(prefill: Worker, decode: Worker) -> float:
    """Bytes/s; that of the decode worker's other peers where there was no pull yet."""
    return decode.links.get(prefill.incarnation) or decode.link_speed or _PRIOR_BANDWIDTH


def _typical(sides: list[list[Worker]]) -> Speeds:
    """Means of what the workers have measured, for those that have not."""
    workers = [worker for side in sides for worker in side]
    lines = [worker.decode_line for worker in workers if worker.decode_line is not None]
    prior = Speeds()
    return Speeds(
        _mean([w.prefill_speed for w in workers if w.prefill_speed]) or prior.prefill,
        _mean([line[0] for line in lines]) or prior.decode_step_s,
        _mean([line[1] for line in lines]) or prior.decode_sequence_s,
    )


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _willing(workers: list[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.breaker.allows()]


def _prefer_others(workers: list[Worker], avoid: Collection[str]) -> list[Worker]:
    return [worker for worker in workers if worker.incarnation not in avoid] or workers


def _by_compatibility(workers: list[Worker]) -> list[list[Worker]]:
    def key(worker: Worker) -> tuple[tuple[str, str], ...]:
        return worker.compatibility

    return [list(group) for _, group in groupby(sorted(workers, key=key), key)]
