"""Pools that change their size while they are simulated, by the controller's own autoscaler."""

from collections.abc import Callable, Mapping

from cluster.autoscaler import Asked, Autoscaler, PoolLoad, RouterQueue, WorkerLoad, decide_together
from core.config import AutoscaleConfig
from planner.deployment import Deployment, Worker
from planner.event_loop import EventLoop

PERIOD_S = 2.0
START_S = 30.0  # a new worker: its process, weights, the first step
SWITCH_S = 1.0  # a change of role, once the worker is idle; measured: milliseconds


class PoolWorkers:
    """The workers of one pool, and what they cost. A worker counts from the decision to start it
    to the decision to end it, also if it still has work then."""

    def __init__(
        self, loop: EventLoop, name: str, make: Callable[[], Worker], replicas: int
    ) -> None:
        self.name = name
        self.ready = [make() for _ in range(replicas)]
        self.sizes = [(loop.now, replicas)]
        self.num_started = self.num_switched = 0  # on the way, and from the other pool
        self._loop, self._make = loop, make
        self._all = list(self.ready)

    @property
    def wanted(self) -> int:
        return self.sizes[-1][1]

    def resize(self, replicas: int) -> None:
        """New workers come after a while, the least loaded go at once and finish what they have."""
        for _ in range(replicas - self.wanted):
            self.num_started += 1
            self._loop.at(self._loop.now + START_S, self._arrive)
        surplus = min(self.wanted - replicas, len(self.ready) - 1)
        for _ in range(surplus):
            self.ready.remove(min(self.ready, key=lambda w: w.load(()).num_requests))
        self.sizes.append((self._loop.now, replicas))

    def give(self, other: "PoolWorkers", count: int) -> None:
        """The least loaded become workers of the other pool when they have finished."""
        for _ in range(count):
            worker = min(self.ready, key=lambda w: w.load(()).num_requests)
            self.ready.remove(worker)
            self._loop.at(self._loop.now + SWITCH_S, other._take, worker)
        self.sizes.append((self._loop.now, self.wanted - count))
        other.sizes.append((self._loop.now, other.wanted + count))
        other.num_switched += count

    def _take(self, worker: Worker) -> None:
        if worker.load(()).num_requests:
            self._loop.at(self._loop.now + SWITCH_S, self._take, worker)
        else:
            self._arrive(None)

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
    """Asks the autoscalers once a period, as the controller does, until the trace is over.
    `switches`: workers may change their role."""

    def __init__(
        self,
        loop: EventLoop,
        deployment: Deployment,
        pools: Mapping[str, PoolWorkers],
        configs: Mapping[str, AutoscaleConfig],
        switches: bool,
        is_over: Callable[[], bool],
    ) -> None:
        self._loop, self._deployment, self._pools = loop, deployment, pools
        self._switches, self._is_over = switches, is_over
        self._scalers = {
            name: Autoscaler(config, name != "decode", name != "prefill")
            for name, config in configs.items()
        }
        self._asked_at = loop.now
        self._seen = (0, 0)
        loop.at(loop.now + PERIOD_S, self._ask)

    def _ask(self, _: None) -> None:
        if self._is_over():
            return
        now, recorder = self._loop.now, self._deployment.recorder
        seen = (recorder.num_arrived, recorder.arrived_tokens)
        prompts, tokens = (after - old for after, old in zip(seen, self._seen, strict=True))
        # As many of them are prefix hits as so far.
        new = 1 - recorder.cached_tokens / max(1, recorder.prompt_tokens)
        waiting, waiting_tokens, since = self._deployment.queue
        queue = RouterQueue(waiting, round(waiting_tokens * new), now - since)
        asked = {}
        for name, scaler in self._scalers.items():
            workers = [_worker_load(worker) for worker in self._pools[name].ready]
            load = PoolLoad(workers, now - self._asked_at, round(tokens * new), prompts, queue)
            asked[name] = Asked(scaler, self._pools[name].wanted, load)
        sizes = {n: d.replicas for n, d in decide_together(now, asked, self._num_movable).items()}
        self._resize(sizes)
        self._asked_at, self._seen = now, seen
        self._loop.at(now + PERIOD_S, self._ask)

    def _num_movable(self, source: str, target: str) -> int:
        return len(self._pools[source].ready) - 1 if self._switches else 0

    def _resize(self, sizes: Mapping[str, int]) -> None:
        """First what one pool gives to another, then starts and ends."""
        missing = {name: size - self._pools[name].wanted for name, size in sizes.items()}
        for source in missing:
            for target in missing:
                most = min(-missing[source], missing[target], self._num_movable(source, target))
                if most > 0:
                    self._pools[source].give(self._pools[target], most)
                    missing[source] += most
                    missing[target] -= most
        for name, size in sizes.items():
            if size != self._pools[name].wanted:
                self._pools[name].resize(size)


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
