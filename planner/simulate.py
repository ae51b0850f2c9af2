"""Runs one layout against one trace."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from core.config import AutoscaleConfig
from planner.batch_worker import BatchWorker, Limits
from planner.deployment import Deployment, Link, Worker
from planner.event_loop import EventLoop
from planner.job import Job
from planner.layout import Layout, Pool
from planner.result import Result
from planner.scaling import PoolWorkers, SimulatedScaling
from planner.scheduled_worker import ScheduledWorker
from planner.shared_host import Pace, Slowdown
from planner.step_model import StepModel
from planner.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Machine:
    """Step times, KV room and links for each tensor-parallel degree: all that a simulation knows
    of hardware and model. `of(pool_name, tp)` may differ by pool (Splitwise mixes hardware).
    `slowdown`: the n-th worker of each pool share a host, or two colocated ones; None: every
    worker has its own."""

    model_of: Callable[[str, int], StepModel]
    limits_of: Callable[[str, int], Limits]
    link_of: Callable[[int], Link]  # by the prefill pool's degree
    slowdown: Slowdown | None = None
    dispatch_s: float = 0.0  # from the client through the router to a worker, and back


@dataclass(frozen=True, slots=True)
class Options:
    """`exact`: every step is scheduled by the engine's own scheduler. `concurrency`: a closed
    loop, in which each end lets the next request in and arrival times do not count. `holds_back`:
    requests wait in the router while the workers have enough to do, as in ours; other systems
    send them on at once."""

    policy: str = "kv_aware"
    exact: bool = False
    seed: int = 0
    concurrency: int | None = None
    holds_back: bool = False
    # By pool; the layout's replicas are what it starts with.
    autoscale: Mapping[str, AutoscaleConfig] = field(default_factory=dict)
    switches: bool = False  # whether workers of the pools that scale may change their role


def simulate(
    layout: Layout, machine: Machine, trace: Trace, options: Options | None = None
) -> Result:
    """Every request of the trace, until the last one has ended."""
    options = options or Options()
    return run(layout, machine, trace.requests, trace.hash_block, options)


def run(
    layout: Layout,
    machine: Machine,
    requests: Iterable[TraceRequest],
    hash_block: int,
    options: Options,
) -> Result:
    """`simulate` on requests that need not all exist at once."""
    loop = EventLoop()
    link = machine.link_of(layout.prefill.tensor_parallel if layout.prefill else 1)
    deployment = Deployment(
        loop, link, options.policy, options.seed, machine.dispatch_s, options.holds_back
    )
    kind = ScheduledWorker if options.exact else BatchWorker
    seats = _Seats(loop, machine.slowdown)

    def make(name: str) -> Worker:
        pool = layout.pools[name]
        return kind(
            loop,
            machine.model_of(name, pool.tensor_parallel),
            _limits(machine, layout, name, pool),
            deployment,
            hash_block if name != "decode" or options.exact else 0,
            seats.take(name),
        )

    pools = {
        name: PoolWorkers(loop, name, partial(make, name), pool.replicas)
        for name, pool in layout.pools.items()
    }
    first = pools.get("prefill") or pools["colocated"]
    deployment.prefills = first.ready
    deployment.decodes = pools["decode"].ready if "decode" in pools else []
    source = _Source(loop, deployment, iter(requests), options.concurrency)
    if options.autoscale:
        SimulatedScaling(
            loop, deployment, pools, options.autoscale, options.switches, source.is_over
        )
    loop.run()
    return Result(
        deployment.recorder,
        loop.now,
        loop.num_events,
        {name: pool.busy for name, pool in pools.items()},
        {name: pool.worker_seconds for name, pool in pools.items()},
        {name: tuple(pool.sizes) for name, pool in pools.items()},
        {name: pool.num_started for name, pool in pools.items()},
        {name: pool.num_switched for name, pool in pools.items()},
    )


def _limits(machine: Machine, layout: Layout, name: str, pool: Pool) -> Limits:
    limits = machine.limits_of(name, pool.tensor_parallel)
    return replace(limits, max_num_batched_tokens=layout.max_num_batched_tokens)


class _Seats:
    """Hosts with room for one worker of each pool, or for two colocated ones, in the order in
    which workers start."""

    def __init__(self, loop: EventLoop, slowdown: Slowdown | None) -> None:
        self._loop, self._slowdown = loop, slowdown
        self._alone: dict[str, deque[Pace]] = defaultdict(deque)  # by who may join them

    def take(self, name: str) -> Pace | None:
        if (slowdown := self._slowdown) is None:
            return None
        # What two colocated workers take from each other was not measured.
        unknown = max(slowdown.prefill, slowdown.decode)
        factor, partner = {
            "prefill": (slowdown.prefill, "decode"),
            "decode": (slowdown.decode, "prefill"),
            "colocated": (unknown, "colocated"),
        }[name]
        mine = Pace(self._loop, factor)
        if self._alone[name]:
            mine.share_with(self._alone[name].popleft())
        else:
            self._alone[partner].append(mine)
        return mine


class _Source:
    """Lets requests in: at their time, or `concurrency` of them at once."""

    def __init__(
        self,
        loop: EventLoop,
        deployment: Deployment,
        requests: Iterator[TraceRequest],
        concurrency: int | None,
    ) -> None:
        self._loop, self._deployment, self._requests = loop, deployment, requests
        self._num = 0
        self._has_more = True
        if concurrency is None:
            self._schedule()
            return
        deployment.on_end = self._enter_next
        for _ in range(concurrency):
            self._enter_next()

    def is_over(self) -> bool:
        """Everything has arrived and ended."""
        return not self._has_more and not self._deployment.recorder.num_inside

    def _schedule(self) -> None:
        # One arrival at a time: a million of them need not be in the heap.
        request = self._next()
        if request is not None:
            self._loop.at(request.arrival, self._enter, request)

    def _next(self) -> TraceRequest | None:
        request = next(self._requests, None)
        self._has_more = request is not None
        return request

    def _enter(self, request: TraceRequest) -> None:
        self._arrive(request)
        self._schedule()

    def _enter_next(self) -> None:
        request = self._next()
        if request is not None:
            self._loop.at(self._loop.now, self._arrive, request)

    def _arrive(self, request: TraceRequest) -> None:
        self._deployment.arrive(Job(self._num, request, self._loop.now))
        self._num += 1
