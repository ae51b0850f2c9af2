"""A simulated deployment: the router's policy, two pools or one, and the links between them."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.event_loop import EventLoop
from planner.job import Job
from planner.result import Recorder
from router.placement.policy import POLICIES, Demand, Load, best_pair, best_worker, has_room


class Worker(Protocol):
    """What `BatchWorker` and `ScheduledWorker` have in common."""

    busy_s: float

    def fits(self, job: Job, decodes: bool) -> bool: ...
    def add_prompt(self, job: Job) -> None: ...
    def reserve(self, job: Job) -> None: ...
    def start_decode(self, job: Job) -> None: ...
    def release(self, job: Job) -> None: ...
    def load(self, hashes: Sequence[bytes]) -> Load: ...


@dataclass(slots=True)
class _Account:
    """What the deployment itself knows of a worker."""

    num_coming: int = 0  # sent to decode there, and not reserved yet: the router counts them
    last_chosen: int = 0
    link_free_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """From each prefill worker to each decode worker; a worker's end serves one copy at a time.
    `overlaps`: blocks travel while the next chunk is computed, so that when the prefill ends at
    most its last chunk is left, unless the link is slower than the prefill."""

    bytes_per_s: float
    latency_s: float = 0.002
    bytes_per_token: float = 0.0
    overlaps: bool = True


_BLOCK = 16  # tokens, for the policy's view
# Links are all alike, so that the best pair is nearly always of the best on each side.
_SHORTLIST = 2
# The router lets those who waited through one by one: each must see what the last one took. A
# worker that is idle begins with the first of them alone.
_PLACING_S = 0.001
# With more workers than this a placement looks at a sample of them.
_LOOK_AT_ALL = 16
_SAMPLE = 4


class Deployment:
    """Carries each job from its arrival to its one end, and tells the recorder.

    Arrival: while the workers have enough to do, a job waits in the router. Then the policy of
    `router.policy` chooses the workers, with the load as it is (the real router sees that of
    other routers' requests up to 100 ms late). Both legs start at once: the decode worker
    reserves when the prefill worker has admitted, pulls while it computes, and decodes when
    everything is there. A job whose answer is its first token never reserves.
    """

    def __init__(
        self,
        loop: EventLoop,
        link: Link,
        policy: str,
        seed: int = 0,
        dispatch_s: float = 0.0,
        holds_back: bool = False,
    ) -> None:
        """`dispatch_s`: from the client through the router to a worker, and back. `holds_back`:
        requests wait in the router while the workers have enough to do."""
        self.prefills: list[Worker] = []  # the colocated pool has only these
        self.decodes: list[Worker] = []
        self.recorder = Recorder()
        self.on_end: Callable[[], None] | None = None  # after a request's one end
        self._accounts: defaultdict[Worker, _Account] = defaultdict(_Account)
        self._loop, self._link = loop, link
        self._policy = POLICIES[policy]
        self._dice = random.Random(f"placement {seed}")
        self._owners: dict[bytes, Worker] = {}  # who computed a block last
        self._num_placed = 0
        self._queue: deque[Job] = deque()
        self._is_letting_in = False
        self._dispatch_s, self._holds_back = dispatch_s, holds_back

    def arrive(self, job: Job) -> None:
        self.recorder.arrived(job, self._loop.now)
        job.hands_over = bool(self.decodes)
        if not self._dispatch_s and not self._queue and self._has_room():
            self._enter(job)
        else:
            self._queue.append(job)
            self._let_in_soon()

    @property
    def queue(self) -> tuple[int, int, float]:
        """What waits in the router: prompts, their tokens, and since when the first one."""
        oldest = self._queue[0].arrival if self._queue else self._loop.now
        return len(self._queue), sum(job.request.num_prompt for job in self._queue), oldest

    def _let_in_soon(self) -> None:
        if self._queue and not self._is_letting_in:
            self._is_letting_in = True
            self._loop.at(self._loop.now + self._dispatch_s, self._let_in)

    def _let_in(self, _: None) -> None:
        """First come, first served, one after the other, while the workers would begin soon."""
        if self._queue and self._has_room():
            self._enter(self._queue.popleft())
            self._loop.at(self._loop.now + _PLACING_S, self._let_in)
        else:
            self._is_letting_in = False

    def _has_room(self) -> bool:
        """As in `router.placement.placer`. A large pool always has: that somebody there has room is
        cheaper to assume than to find out."""
        sides = ((self.prefills, True, not self.decodes), (self.decodes, False, True))
        return not self._holds_back or all(
            not pool
            or len(pool) > _LOOK_AT_ALL
            or any(has_room(self._load(worker), prefills, decodes) for worker in pool)
            for pool, prefills, decodes in sides
        )

    def _enter(self, job: Job) -> None:
        self._place(job)
        if job.prefill.fits(job, not job.hands_over) and job.decode.fits(job, True):
            self._accounts[job.decode].num_coming += _reserves(job)
            job.prefill.add_prompt(job)
        else:
            self.recorder.rejected(job, self._loop.now)
            self._ended()

    def _place(self, job: Job) -> None:
        demand = Demand(job.request.num_prompt, job.request.num_output, _BLOCK)
        policy = self._policy
        prefills = self._candidates(self.prefills, job)
        if job.hands_over:
            decodes = self._candidates(self.decodes, job)
            _, p, d = best_pair(prefills, decodes, policy, demand, self._bandwidth, _SHORTLIST)
            job.prefill, job.decode = p.worker, d.worker
        else:
            job.prefill = job.decode = best_worker(prefills, policy.colocated, demand).worker
        for worker in (job.prefill, job.decode):
            self._num_placed += 1
            self._accounts[worker].last_chosen = self._num_placed
        if len(self.prefills) > _LOOK_AT_ALL:
            self._owners.update(dict.fromkeys(job.request.hashes, job.prefill))

    def _candidates(self, workers: list[Worker], job: Job) -> list[tuple[Worker, Load]]:
        """The pool, or a sample of it and the worker that knows the prefix."""
        hashes = job.request.hashes
        candidates = workers
        if len(workers) > _LOOK_AT_ALL:
            candidates = self._dice.choices(workers, k=_SAMPLE)
            owner = self._owner(hashes) if workers is self.prefills else None
            if owner is not None and owner not in candidates:
                candidates.append(owner)
        return [(w, self._load(w, hashes)) for w in candidates]

    def _load(self, worker: Worker, hashes: Sequence[bytes] = ()) -> Load:
        load, account = worker.load(hashes), self._accounts[worker]
        return load._replace(
            num_requests=load.num_requests + account.num_coming,
            last_chosen=account.last_chosen,
            token_bytes=self._link.bytes_per_token,
        )

    def _bandwidth(self, prefill: Worker, decode: Worker) -> float:
        return self._link.bytes_per_s

    def _owner(self, hashes: Sequence[bytes]) -> Worker | None:
        """Of the longest prefix that somebody was asked to compute."""
        return next((self._owners[h] for h in reversed(hashes) if h in self._owners), None)

    # ------------------------------------------------- what workers say (Host)

    def admitted(self, job: Job) -> None:
        self.recorder.admitted(job, self._loop.now)
        if _reserves(job):
            self._accounts[job.decode].num_coming -= 1
            job.decode.reserve(job)

    def reserved(self, job: Job) -> None:
        job.reserved_at = self._loop.now
        if job.first_token_at >= 0:
            self._transfer(job)

    def first_token(self, job: Job) -> None:
        job.first_token_at = self._loop.now
        if job.reserved_at >= 0:
            self._transfer(job)
        self._let_in_soon()

    def done(self, job: Job) -> None:
        self.recorder.finished(job, self._loop.now)
        self._let_in_soon()
        self._ended()

    def gap(self, seconds: float, count: int) -> None:
        self.recorder.gap(seconds, count)

    def _ended(self) -> None:
        if self.on_end is not None:
            self.on_end()

    # -------------------------------------------------------------- the links

    def _transfer(self, job: Job) -> None:
        now, link = self._loop.now, self._link
        left = link.bytes_per_token * job.request.num_prompt
        if link.overlaps:
            sent = (job.first_token_at - job.reserved_at) * link.bytes_per_s
            left = min(left, max(left - sent, link.bytes_per_token * job.last_chunk))
        source, target = self._accounts[job.prefill], self._accounts[job.decode]
        start = max(now, source.link_free_at, target.link_free_at)
        end = start + left / link.bytes_per_s
        source.link_free_at = target.link_free_at = end
        self._loop.at(end + link.latency_s, self._arrived, job)

    def _arrived(self, job: Job) -> None:
        job.prefill.release(job)
        job.decode.start_decode(job)


def _reserves(job: Job) -> bool:
    """Whether it needs room on another worker than the one that prefills."""
    return job.hands_over and job.request.num_output > 1
