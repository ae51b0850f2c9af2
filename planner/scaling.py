"""Pools that change their size while they are simulated, by the controller's own autoscaler."""

from collections.abc import Callable

from cluster.autoscaler import Autoscaler, PoolLoad, WorkerLoad
from core.config import AutoscaleConfig
from planner.deployment import Deployment, Worker
from planner.event_loop import EventLoop

PERIOD_S = 2.0
START_S = 30.0  # a new worker: its process, weights, the first step


class PoolWorkers:
    """The workers of one pool, and what they cost. A worker counts from the decision to start it
    to the decision to end it, also if it still has work then."""

    def __init__(
        self, loop: EventLoop, name: str, make: Callable[[], Worker], replicas: int
    ) -> None:
        self.name = name
        self.ready = [make() for _ in range(replicas)]
        self.sizes = [(loop.now, replicas)]
        self._loop, self._make = loop, make
        self._all = list(self.ready)

    @property
    def wanted(self) -> int:
        return self.sizes[-1][1]

    def resize(self, replicas: int) -> None:
        """New workers come after a while, the least loaded go at once and finish what they have."""
        for _ in range(replicas - self.wanted):
            self._loop.at(self._loop.now + START_S, self._arrive)
        surplus = min(self.wanted - replicas, len(self.ready) - 1)
        for _ in range(surplus):
            self.ready.remove(min(self.ready, key=lambda w: w.load(()).num_requests))
        self.sizes.append((self._loop.now, replicas))

    def _arrive(self, _: None) -> None:
        if len(self.ready) < self.wanted:  # it may have been taken back meanwhile
            worker = self._make()
            self.ready.append(worker)
            self._all.append(worker)

    @property
    def worker_seconds(self) -> float:
        ends = [start for start, _ in self.sizes[1:]] + [self._loop.now]
        return sum((e - s) * n for (s, n), e in zip(self.sizes, ends, strict=True))

    @property
    def busy(self) -> float:
        return sum(w.busy_s for w in self._all) / max(self.worker_seconds, 1e-9)


class SimulatedScaling:
    """Asks the autoscaler once a period, as the controller does, until the trace is over."""

    def __init__(
        self,
        loop: EventLoop,
        deployment: Deployment,
        pool: PoolWorkers,
        config: AutoscaleConfig,
        is_over: Callable[[], bool],
    ) -> None:
        self._loop, self._deployment, self._pool = loop, deployment, pool
        self._is_over = is_over
        self._scaler = Autoscaler(config, pool.name != "decode", pool.name != "prefill")
        self._asked_at = loop.now
        self._seen = (0, 0)
        loop.at(loop.now + PERIOD_S, self._ask)

    def _ask(self, _: None) -> None:
        if self._is_over():
            return
        now, recorder = self._loop.now, self._deployment.recorder
        seen = (recorder.num_arrived, recorder.arrived_tokens)
        prompts, tokens = (new - old for new, old in zip(seen, self._seen, strict=True))
        workers = [_worker_load(worker) for worker in self._pool.ready]
        load = PoolLoad(workers, now - self._asked_at, tokens, prompts)
        decision = self._scaler.decide(now, self._pool.wanted, load)
        if decision.replicas != self._pool.wanted:
            self._pool.resize(decision.replicas)
        self._asked_at, self._seen = now, seen
        self._loop.at(now + PERIOD_S, self._ask)


def _worker_load(worker: Worker) -> WorkerLoad:
    load = worker.load(())
    return WorkerLoad(
        waiting_prefill_tokens=load.queued_tokens,
        requests_running=load.num_requests,
        requests_waiting=0,
        kv_use=1 - load.free_blocks / max(1, load.total_blocks),
        max_num_seqs=load.max_num_seqs,
        prefill_tokens_per_second=load.speeds.prefill,
        decode_step_seconds=load.speeds.decode_step_s,
        decode_sequence_seconds=load.speeds.decode_sequence_s,
    )
