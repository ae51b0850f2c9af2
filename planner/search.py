"""Finds the layout with the highest goodput, and the smallest that holds a trace."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from planner.layout import Layout, Pool
from planner.machines import Capability
from planner.result import Result, Slo
from planner.simulate import Machine, Options, simulate
from planner.trace import Trace

CHUNKS = (512, 2048)
_MOST_SPLITS = 16  # prefill pool sizes that are tried for each pair of degrees
_PRECISION = 0.02
_WARM_UP = 0.25
_MOST_DOUBLINGS = 6
_BOUND_SLACK = 1.25  # by which the bound below may be too low


@dataclass(frozen=True, slots=True)
class Goal:
    """`attainment`: the share of requests that must meet the SLO for a rate to count. A rate is
    simulated for `seconds` and for `requests` at least: a queue that grows needs time to show."""

    slo: Slo
    attainment: float = 0.9
    seconds: float = 60.0
    requests: int = 1000


@dataclass(frozen=True, slots=True)
class Found:
    """The best of one kind. `goodput`: the highest rate, in requests a second, at which the
    goal holds."""

    layout: Layout
    goodput: float
    at_goodput: Result

    @property
    def per_gpu(self) -> float:
        return self.goodput / self.layout.gpus


@dataclass(frozen=True, slots=True)
class Plan:
    """Best first. `smallest`: the layout with the fewest GPUs that holds the trace at its own
    rate, if one does."""

    best: tuple[Found, ...]
    smallest: Layout | None
    num_candidates: int
    num_simulations: int


def layouts(gpus: int, degrees: Sequence[int]) -> list[Layout]:
    """Everything worth trying that uses at most so many GPUs, and cannot be made larger."""
    found = []
    for tp in degrees:
        if tp <= gpus:
            found += [
                Layout(colocated=Pool(gpus // tp, tp), max_num_batched_tokens=chunk)
                for chunk in CHUNKS
            ]
    for prefill_tp in degrees:
        for decode_tp in degrees:
            most = (gpus - decode_tp) // prefill_tp
            for replicas in _spread(most):
                left = gpus - replicas * prefill_tp
                found.append(Layout(Pool(replicas, prefill_tp), Pool(left // decode_tp, decode_tp)))
    return found


def _spread(most: int) -> Iterable[int]:
    """1 to `most`, or evenly spaced when these are many."""
    if most <= _MOST_SPLITS:
        return range(1, most + 1)
    return sorted({1 + round(i * (most - 1) / (_MOST_SPLITS - 1)) for i in range(_MOST_SPLITS)})


class Searcher:
    """Simulates layouts against one trace. Deterministic: the same inputs give the same plan."""

    def __init__(
        self, capability: Capability, trace: Trace, goal: Goal, options: Options | None = None
    ) -> None:
        self.num_simulations = 0
        self._capability = capability
        self._trace = trace
        self._goal = goal
        self._options = options or Options()
        self._demand = _Demand.of(trace)

    def plan(self, gpus: int, say: Callable[[str], None] = lambda _: None) -> Plan:
        """The best disaggregated and the best colocated layout, the better one first."""
        candidates = layouts(gpus, self._capability.degrees)
        found = []
        for disaggregated in (True, False):
            kind = [c for c in candidates if c.is_disaggregated == disaggregated]
            best = self._best(kind, say)
            if best is not None:
                found.append(best)
        found.sort(key=lambda f: f.goodput, reverse=True)
        smallest = self._smallest(gpus, say)
        return Plan(tuple(found), smallest, len(candidates), self.num_simulations)

    def run(self, layout: Layout, rate: float) -> Result:
        self.num_simulations += 1
        count = max(self._goal.requests, int(rate * self._goal.seconds))
        trace = self._trace.repeated(count).at_rate(rate)
        return simulate(layout, self._capability.machine, trace, self._options)

    def holds(self, result: Result) -> bool:
        return result.attainment(self._goal.slo, _WARM_UP) >= self._goal.attainment

    def goodput(self, layout: Layout, at_least: float = 0.0) -> Found | None:
        """The highest rate at which the goal holds; None if that is not above `at_least`."""
        low, best = at_least, None
        high = max(self.bound(layout), low * (1 + _PRECISION))
        if low:
            low *= 1 + _PRECISION
            best = self.run(layout, low)
            if not self.holds(best):
                return None
        for _ in range(_MOST_DOUBLINGS):
            result = self.run(layout, high)
            if not self.holds(result):
                break
            low, best, high = high, result, 2 * high
        while high - low > _PRECISION * high and high > 1e-4:
            middle = (low + high) / 2
            result = self.run(layout, middle)
            if self.holds(result):
                low, best = middle, result
            else:
                high = middle
        return None if best is None else Found(layout, low, best)

    def bound(self, layout: Layout) -> float:
        """A rate that the layout can hardly exceed: arithmetic without any queue."""
        return self._demand.bound(layout, self._capability.machine, self._goal.slo)

    def _best(self, kind: list[Layout], say: Callable[[str], None]) -> Found | None:
        best: Found | None = None
        # Promising ones first: the others then need one simulation, or none.
        for layout in sorted(kind, key=self.bound, reverse=True):
            floor = best.goodput if best else 0.0
            if self.bound(layout) * _BOUND_SLACK <= floor:
                break
            say(f"trying {layout}")
            best = self.goodput(layout, floor) or best
        return best

    def _smallest(self, gpus: int, say: Callable[[str], None]) -> Layout | None:
        """By bisection: what holds the trace with some GPUs does so with more."""
        low, high, best = 0, gpus, self._holding(gpus, say)
        while best is not None and high - low > 1:
            middle = (low + high) // 2
            layout = self._holding(middle, say)
            if layout is None:
                low = middle
            else:
                high, best = middle, layout
        return best

    def _holding(self, gpus: int, say: Callable[[str], None]) -> Layout | None:
        """A layout of so many GPUs that holds the trace at its own rate."""
        rate = self._trace.rate
        for layout in sorted(layouts(gpus, self._capability.degrees), key=self.bound, reverse=True):
            if self.bound(layout) * _BOUND_SLACK < rate:
                return None
            say(f"does {layout} hold the trace?")
            if self.holds(self.run(layout, rate)):
                return layout
        return None


@dataclass(frozen=True, slots=True)
class _Demand:
    """The mean request."""

    new_tokens: float  # prompt tokens that the largest cache would not hold
    num_output: float
    context: float  # while it decodes

    @classmethod
    def of(cls, trace: Trace) -> "_Demand":
        count = len(trace.requests)
        new = sum(r.num_prompt for r in trace.requests)
        if trace.hash_block:
            seen: set[bytes] = set()
            for request in trace.requests:
                new -= trace.hash_block * sum(h in seen for h in request.hashes)
                seen.update(request.hashes)
        outputs = sum(r.num_output for r in trace.requests) / count
        prompts = sum(r.num_prompt for r in trace.requests) / count
        return cls(max(new / count, 1.0), outputs, prompts + outputs / 2)

    def bound(self, layout: Layout, machine: Machine, slo: Slo) -> float:
        budget = layout.max_num_batched_tokens
        if layout.colocated is not None:
            pool, name = layout.colocated, "colocated"
            seconds = self._prefill(machine, name, pool, budget)
            return pool.replicas / (seconds + self._decode(machine, name, pool, slo))
        assert layout.prefill is not None and layout.decode is not None
        prefill = self._prefill(machine, "prefill", layout.prefill, budget)
        decode = self._decode(machine, "decode", layout.decode, slo)
        return min(layout.prefill.replicas / prefill, layout.decode.replicas / decode)

    def _prefill(self, machine: Machine, name: str, pool: Pool, budget: int) -> float:
        """Seconds of one request, attention left out, in full steps."""
        model = machine.model_of(name, pool.tensor_parallel)
        return model.step(budget, 0.0, 0, 0) * self.new_tokens / budget

    def _decode(self, machine: Machine, name: str, pool: Pool, slo: Slo) -> float:
        """Seconds of one request as a part of the largest batch that fits memory and SLO."""
        model = machine.model_of(name, pool.tensor_parallel)
        limits = machine.limits_of(name, pool.tensor_parallel)
        best, batch = float("inf"), 1
        while batch == 1 or (
            batch <= limits.max_num_seqs and batch * self.context <= limits.kv_tokens
        ):
            fixed, per_kv = model.decode(batch)
            step = fixed + per_kv * self.context * batch
            if step <= slo.tpot or batch == 1:
                best = min(best, step / batch)
            batch *= 2
        # Only powers of two were tried: a batch up to twice as large may be possible.
        return best * max(self.num_output - 1, 0.0) / 1.5 + 1e-9
