"""How many workers a pool should have. No I/O and no clock: the controller and the planner's
simulation call the same code.

Prefill is sized by prompt tokens a second and by what waits, decode by running sequences, the
time of a step and KV in use; each from speeds that the pool's own workers measured. At each look
it is known how many workers would do for what is there now (`cluster.hindsight`). A pool

- grows at once, by a bounded factor, to what the load will be when a new worker is there;
- where more than one prompt in ten of the last half hour met too long a queue, has what would
  have done for nine in ten: bursts that are over before a worker starts will come again;
- grows by one worker where that was so for some minutes, whatever was computed;
- shrinks, to half at most, when for `down_seconds` less would do for the load and would have done
  for nearly every moment of the last minutes; after longer, each time that was taken back;
- lends what it has to spare to another pool, where workers may change their role.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.hindsight import RecentSizes, VirtualQueues
from core.config import AutoscaleConfig

_SOON, _LONG = 30.0, 120.0  # seconds of the averages of a load: a rise is seen early, a level late
_CHANCE = 2.0  # standard deviations by which the first is above the second: a rise, and goes on
_VARIANCE = 1.5  # of the tokens that arrive, in prompts: 1 for their number, the rest for lengths
_LEVEL_SPARE = 1.05  # above the load, before a pool gets smaller
# Of ttft_p90, that a prompt may wait also if it takes as long by itself: no pool can help that.
_LEAST_SLACK = 0.25
_MINUTES, _HALF_HOUR = 300.0, 1800.0  # of memory
_MOST_LATE, _NEARLY_ALL = 0.1, 0.96  # shares: as p90 says, and what a smaller pool must do for
_GROWTH = 2.0  # at most so many times the workers of now, or as small a part, in one step
_MOST_PATIENCE = 8  # times down_seconds
_TAKEN_BACK = 600.0  # seconds from a step down to the step up that says it was wrong
_DRAINED = 60.0  # after a change: from now on what waits is what waits at this size
_LEND_SECONDS = 20.0  # in which a pool can do without a worker that it lends
_LEND_SPARE = 1.25  # and would for so much more load


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one ready worker says of itself."""

    waiting_prefill_tokens: int
    requests_running: int
    requests_waiting: int
    kv_use: float  # share of its blocks that are not free or only cached, 0 to 1
    max_num_seqs: int
    prefill_tokens_per_second: float  # 0: not measured yet
    decode_step_seconds: float  # a step of n sequences: step + n * sequence; 0: not measured yet
    decode_sequence_seconds: float


@dataclass(frozen=True, slots=True)
class RouterQueue:
    """What waits in the routers for a worker to have room. `tokens` are no prefix hits."""

    prompts: int = 0
    tokens: int = 0
    oldest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool over the last interval. `prompt_tokens`: that arrived in it, at workers or routers,
    and were no prefix hits; `prompts`: how many prompts they were, 0 if none arrived. Those that
    a router refused are among them."""

    workers: Sequence[WorkerLoad]
    seconds: float
    prompt_tokens: int = 0
    prompts: int = 0
    queue: RouterQueue = RouterQueue()


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str  # for people


@dataclass(frozen=True, slots=True)
class _Need:
    """In workers. `ahead`: when a new one is there; `now`: of this moment, not rounded; `size`:
    the least that would do at this moment; `is_late`: prompts meet too long a queue."""

    ahead: float
    now: float
    size: int
    reason: str
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A pool's part in a common decision."""

    scaler: "Autoscaler"
    present: int
    load: PoolLoad


def decide_together(
    now: float, pools: Mapping[str, Asked], movable: Callable[[str, str], int]
) -> dict[str, Decision]:
    """The pools that change. One that grows gets what another has to spare: at most
    `movable(source, target)` workers, which can change their role."""
    decisions = {name: p.scaler.decide(now, p.present, p.load) for name, p in pools.items()}
    changes = {n: d for n, d in decisions.items() if d.replicas != pools[n].present}
    for target, decision in tuple(changes.items()):
        missing = decision.replicas - pools[target].present
        for source, lender in pools.items():
            if source in changes:
                continue
            spare = lender.scaler.spare(now, lender.present)
            count = min(missing, spare, movable(source, target))
            if count > 0:
                changes[source] = lender.scaler.lend(now, lender.present, count, target)
                missing -= count
    return changes


class Autoscaler:
    """Holds one pool at its targets. Owns the memory of what was needed."""

    def __init__(self, config: AutoscaleConfig, has_prefill: bool, has_decode: bool) -> None:
        self._config = config
        self._has_prefill, self._has_decode = has_prefill, has_decode
        self._seconds = 0.0  # that were looked at
        self._tokens, self._prompts = _Average(), _Average()  # a second
        self._batches = _Average()  # full ones
        self._prompt_size = 0.0
        self._waiting = 0  # prompt tokens at the last look
        self._queues = VirtualQueues(config.max)
        self._minutes, self._half_hour = RecentSizes(_MINUTES), RecentSizes(_HALF_HOUR)
        # At each look: the least that is enough, and that would be enough for a while.
        self._sizes: deque[tuple[float, int, int]] = deque()
        self._started_at: float | None = None
        self._changed_at = self._shrunk_at = -math.inf
        self._patience = 1  # times down_seconds
        self._num_lent = 0  # that memory alone does not ask for again

    def decide(self, now: float, present: int, load: PoolLoad) -> Decision:
        """`now`: any clock's seconds, never going back; `present`: replicas that are wanted now,
        whether or not they are all there."""
        if self._started_at is None:
            self._started_at = now
        need = self._look(now, present, load)
        self._remember(now, need)
        wish, reason = self._wish(now, present, len(load.workers), need)
        if wish > present and now - self._changed_at >= self._config.up_seconds:
            was_wrong = now - self._shrunk_at < self._patience * _TAKEN_BACK
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if was_wrong else 1
            self._shrunk_at, self._num_lent = -math.inf, 0
            most = max(present + 1, math.floor(present * _GROWTH))
            return self._change(now, min(wish, most), reason)
        return self._smaller(now, present) or Decision(self._config.bounded(present), "its bounds")

    def _look(self, now: float, present: int, load: PoolLoad) -> _Need:
        """Learns from a look. What asks for most is needed."""
        self._learn(load)
        is_settled = len(load.workers) >= present and now - self._changed_at >= _DRAINED
        needs = [_Need(0.0, 0.0, 0, "its bounds")]
        if load.workers and self._has_prefill:
            needs.append(self._for_prompts(load, is_settled))
        if load.workers and self._has_decode:
            needs += [self._for_steps(load), self._for_blocks(load)]
        need = _Need(
            max(need.ahead for need in needs),
            max(need.now for need in needs),
            max(need.size for need in needs),
            max(needs, key=lambda need: need.ahead).reason,
            any(need.is_late for need in needs),
        )
        weight = load.prompts if self._has_prefill else load.seconds
        for memory in (self._minutes, self._half_hour):
            memory.note(now, need.size, weight, need.is_late)
        return need

    def _wish(self, now: float, present: int, count: int, need: _Need) -> tuple[int, str]:
        """The size that is asked for, and why."""
        wish, reason = _whole(need.ahead), need.reason
        has_tried = count >= present and self._quiet(now) >= _MINUTES
        if self._remembered > wish:
            wish, reason = self._remembered, _too_late(self._half_hour)
        elif has_tried and wish <= present and self._minutes.late > _MOST_LATE:
            wish, reason = present + 1, _too_late(self._minutes)
        return self._config.bounded(wish), reason

    @property
    def _remembered(self) -> int:
        """What would have done for nine in ten where that was not so; less what was lent since."""
        if self._half_hour.late <= _MOST_LATE or not self._is_known:
            return 0
        return self._half_hour.least(1 - _MOST_LATE) - self._num_lent

    def _remember(self, now: float, need: _Need) -> None:
        enough = max(
            _whole(need.ahead * _LEVEL_SPARE), self._minutes.least(_NEARLY_ALL), self._remembered
        )
        bounded = self._config.bounded
        self._sizes.append((now, bounded(enough), bounded(_whole(need.now * _LEND_SPARE))))
        while self._sizes[0][0] < now - _MOST_PATIENCE * self._config.down_seconds:
            self._sizes.popleft()

    def _smaller(self, now: float, present: int) -> Decision | None:
        assert self._started_at is not None
        down = self._patience * self._config.down_seconds
        if self._quiet(now) < down or now - self._started_at < _MINUTES:
            return None
        lately = max(size for at, size, _ in self._sizes if at >= now - down)
        if lately >= present:
            return None
        self._shrunk_at = now
        fewer = max(lately, math.ceil(present / _GROWTH))
        return self._change(now, fewer, f"{lately} would do for the last {down:g} s")

    def spare(self, now: float, present: int) -> int:
        """Workers that another pool may have at once, since they can come back as fast."""
        if self._started_at is None or self._quiet(now) < _LEND_SECONDS:
            return 0
        lately = max(size for at, _, size in self._sizes if at >= now - _LEND_SECONDS)
        return max(0, present - lately)

    def lend(self, now: float, present: int, count: int, to: str) -> Decision:
        """Leaves the pool without `count` of its workers."""
        left = present - count
        decision = self._change(now, left, f"{to} asks for more, and {left} do here")
        self._num_lent += count
        return decision

    def _quiet(self, now: float) -> float:
        """Seconds without a change that were looked at."""
        assert self._started_at is not None
        return now - max(self._changed_at, self._started_at)

    @property
    def _is_known(self) -> bool:
        """Of the first moments chance would say too much."""
        return self._seconds >= _SOON

    def _change(self, now: float, replicas: int, reason: str) -> Decision:
        self._changed_at = now
        return Decision(replicas, reason)

    def _learn(self, load: PoolLoad) -> None:
        if load.seconds <= 0:
            return
        self._seconds += load.seconds
        self._tokens.learn(load.prompt_tokens / load.seconds, load.seconds, self._seconds)
        self._prompts.learn(load.prompts / load.seconds, load.seconds, self._seconds)
        if load.prompts:
            size = load.prompt_tokens / load.prompts
            self._prompt_size = self._prompt_size or size
            weight = _weight(load.seconds, _SOON, self._seconds)
            self._prompt_size += (size - self._prompt_size) * weight

    # ------------------------------------------------------------ prefill

    def _for_prompts(self, load: PoolLoad, is_settled: bool) -> _Need:
        speeds = [w.prefill_tokens_per_second for w in load.workers if w.prefill_tokens_per_second]
        if not speeds:
            return _Need(0.0, 0.0, 0, "no prompt yet")
        speed, count = sum(speeds) / len(speeds), len(load.workers)
        waiting = sum(w.waiting_prefill_tokens for w in load.workers)
        if all(w.waiting_prefill_tokens for w in load.workers):
            waiting += load.queue.tokens  # the routers hold them back for one of these
        before, self._waiting = self._waiting, waiting
        service, target = self._prompt_size / speed, self._config.ttft_p90 or 1.0
        slack = max(target - service, _LEAST_SLACK * target)
        size = self._queues.advance(load.prompt_tokens, speed * load.seconds, speed * slack)
        if is_settled:
            self._queues.correct(count, waiting)
        full = speed * _utilisation(slack, service, count)
        soon, long = self._tokens.soon, self._tokens.long
        usual = min(soon, long)  # what is over does not come again
        # Of 60 s, which is about what an average over 30 s knows.
        num_prompts = max(1.0, 2 * _SOON * self._prompts.soon)
        ahead = _ahead(soon, usual, _CHANCE * usual * math.sqrt(_VARIANCE / num_prompts))
        reason = f"{soon:.0f} prompt tokens/s and {waiting} waiting, at {speed:.0f} a worker"
        if load.queue.prompts:
            reason += f"; {load.queue.oldest_seconds:.1f} s in the router"
        return _Need(
            # For a short while they may be full.
            max(ahead / speed, usual / full) if self._is_known else 0.0,
            max(soon, long) / full,
            size,
            reason,
            is_late=(before + waiting) / 2 > speed * slack * count,
        )

    # ------------------------------------------------------------- decode

    def _for_steps(self, load: PoolLoad) -> _Need:
        """So few sequences a worker that a step keeps to tpot_p90."""
        most, pace = self._batch(load.workers)
        counts = [w.requests_running + w.requests_waiting for w in load.workers]
        # With fewer workers steps are longer, and so do sequences stay: tokens a second count.
        # Where that is more than fits, it is sequences that pile up.
        use = sum(n / most * max(1.0, pace(most) / pace(n)) for n in counts if n)
        if all(n >= w.max_num_seqs for n, w in zip(counts, load.workers, strict=True)):
            use += load.queue.prompts / most  # the routers hold them back for one of these
        if load.seconds > 0:
            self._batches.learn(use, load.seconds, self._seconds)
        usual = min(self._batches.soon, self._batches.long)
        ahead = _ahead(self._batches.soon, usual, _CHANCE * math.sqrt(usual / most))
        reason = f"{sum(counts)} sequences, {most} a worker"
        return _Need(ahead, use, _whole(use), reason)

    def _batch(self, workers: Sequence[WorkerLoad]) -> tuple[int, Callable[[int], float]]:
        """The most sequences that keep to the target, and the seconds of a step of so many."""
        most, target = min(w.max_num_seqs for w in workers), self._config.tpot_p90
        step = max(w.decode_step_seconds for w in workers)
        each = max(w.decode_sequence_seconds for w in workers)
        if not step and not each:  # not measured yet
            return most, lambda count: 1.0
        if target is not None and each:
            most = max(1, min(most, math.floor((target - step) / each + 1e-9)))
        return most, lambda count: step + count * each

    def _for_blocks(self, load: PoolLoad) -> _Need:
        use = sum(w.kv_use for w in load.workers)
        needed = use / self._config.kv_use
        reason = f"KV of {use:.2f} workers in use, {self._config.kv_use:g} wanted"
        return _Need(needed, needed, _whole(needed), reason)


class _Average:
    """Moving averages of one value: a rise is seen in `soon`, a level in `long`."""

    def __init__(self) -> None:
        self.soon = self.long = 0.0

    def learn(self, value: float, seconds: float, total_seconds: float) -> None:
        self.soon += (value - self.soon) * _weight(seconds, _SOON, total_seconds)
        self.long += (value - self.long) * _weight(seconds, _LONG, total_seconds)


def _weight(seconds: float, span: float, total_seconds: float) -> float:
    """Of the newest of a moving average; a plain average until `span` has passed."""
    return max(-math.expm1(-seconds / span), seconds / total_seconds)


def _ahead(soon: float, usual: float, chance: float) -> float:
    """What a rise that is more than chance will have become when a new worker is there: the two
    averages are 90 s apart, and late by 30 s."""
    rise = soon - usual
    return soon + rise if rise > chance else soon


def _utilisation(slack: float, service: float, count: int) -> float:
    """The share of its time that a worker may compute so that nine of ten prompts wait at most
    `slack`. The wait of a queue with fixed service times (M/D/c, about M/D/1's by c) is exceeded
    by one in ten at 1.15 * service * load / (1 - load) / c."""
    if not service:
        return 1.0
    waits = slack * count / (1.15 * service)
    return waits / (1 + waits)


def _too_late(memory: RecentSizes) -> str:
    return f"{memory.late:.0%} of the prompts of {memory.span / 60:g} min met too long a queue"


def _whole(workers: float) -> int:
    return math.ceil(workers - 1e-9)
