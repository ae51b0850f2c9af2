"""How many workers a pool should have. No I/O and no clock: the controller and the planner's
simulation call the same code.

Prefill is sized by prompt tokens a second and by what waits, decode by running sequences, the
time of a step and KV in use; each from speeds that the pool's own workers measured. A pool

- grows at once, by a bounded factor, when the load of a short while is more than its queues may
  take up within the target, or when prompts have waited too long too often;
- shrinks, to half at most, when the whole `down_seconds` before would have done with less at a
  quarter more load;
- settles by one worker when a few times as long did with less on average, and nobody waited;
- lends what it has to spare to another pool, where workers may change their role.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.config import AutoscaleConfig

# Arrivals and running sequences are averaged over each: a rise is seen early, a level late.
_SPANS = (10.0, 30.0, 120.0)
_RISE = 1.1  # of the second over the third average: more than chance, and goes on
_CHANCE = 4.0  # standard deviations of a number of sequences, about the root of their mean
_MIN_UTILISATION, _MAX_UTILISATION = 0.3, 0.9
_FULL = 0.9  # of a decode batch: one in ten steps may meet a fuller one than the average
_GROWTH = 2.0  # at most so many times the workers of now, or as small a part, in one step
_DRAIN_SECONDS = 10.0  # in which what waits too long should be gone
_SPARE = 1.25  # a pool shrinks only to a size that would do for so much more load
_PERSISTENT = 3  # a backlog counts once it was there at so many looks in a row
# Times down_seconds of a level before a step down to what fits it; twice as many each time that
# such a step had to be taken back.
_LEAST_PATIENCE, _MOST_PATIENCE = 3, 24
_LONGEST_MEMORY = 7200.0  # seconds of looks, unless down_seconds is longer
_LEVEL_SPARE = 1.05  # above that level
_LEND_SECONDS = 20.0  # in which a pool can do without a worker that it lends
_LATE_SPAN = 300.0  # over which prompts that met too long a queue are counted
_TOO_MANY_LATE, _FEW_LATE = 0.1, 0.03  # of them: the pool is too small, may get smaller


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
class PoolLoad:
    """A pool over the last interval. `prompt_tokens`: that arrived in it and were no prefix hits;
    `prompts`: how many prompts they were, 0 if none arrived."""

    workers: Sequence[WorkerLoad]
    seconds: float
    prompt_tokens: int = 0
    prompts: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str  # for people


@dataclass(frozen=True, slots=True)
class _Need:
    """In workers, not rounded. `grow`: more than that many make a pool grow; `keep`: of this
    moment; `level`: of the last minutes."""

    grow: float
    keep: float
    level: float
    reason: str


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
                changes[source] = lender.scaler.lend(now, lender.present - count, target)
                missing -= count
    return changes


class Autoscaler:
    """Holds one pool at its targets. Owns the memory that keeps it from swinging."""

    def __init__(self, config: AutoscaleConfig, has_prefill: bool, has_decode: bool) -> None:
        self._config = config
        self._has_prefill, self._has_decode = has_prefill, has_decode
        self._rates = [0.0] * len(_SPANS)  # prompt tokens a second
        self._running = [0.0] * len(_SPANS)  # sequences
        self._seconds = 0.0  # that were looked at
        self._prompt_size = 0.0
        self._prompts = self._late_prompts = 0.0  # of _LATE_SPAN; that met too long a queue
        # Sizes that would have done at each look, with some to spare; of the moment and the level.
        self._sizes: deque[tuple[float, int, int]] = deque()
        self._backlogs: deque[float] = deque(maxlen=_PERSISTENT)
        self._changed_at = -math.inf
        self._has_settled, self._patience = False, _LEAST_PATIENCE  # whether by the last change
        self._started_at: float | None = None

    def decide(self, now: float, present: int, load: PoolLoad) -> Decision:
        """`now`: any clock's seconds, never going back; `present`: replicas that are wanted now,
        whether or not they are all there."""
        if self._started_at is None:
            self._started_at = now
        self._learn(load)
        need = self._needed(load, present)
        self._remember(now, need)
        wish = self._config.bounded(_whole(need.grow))
        if wish > present and now - self._changed_at >= self._config.up_seconds:
            most = max(present + 1, math.floor(present * _GROWTH))
            if self._has_settled:  # and should not have
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            # The next step must have reasons of its own.
            self._late_prompts = min(self._late_prompts, _FEW_LATE * self._prompts)
            return self._change(now, min(wish, most), need.reason)
        return self._smaller(now, present) or Decision(self._config.bounded(present), "its bounds")

    def _remember(self, now: float, need: _Need) -> None:
        bounded = self._config.bounded
        of_now, of_level = _whole(need.keep * _SPARE), _whole(need.level * _LEVEL_SPARE)
        self._sizes.append((now, bounded(of_now), bounded(of_level)))
        while self._sizes[0][0] < now - self._settle_seconds:
            self._sizes.popleft()

    def _smaller(self, now: float, present: int) -> Decision | None:
        assert self._started_at is not None
        quiet = now - max(self._changed_at, self._started_at)
        down = self._config.down_seconds
        if quiet < down:
            return None
        lately = max(size for at, size, _ in self._sizes if at >= now - down)
        if lately < present:
            fewer = max(lately, math.ceil(present / _GROWTH))
            return self._change(now, fewer, f"{lately} would do for the last {down:g} s")
        level = max(size for _, _, size in self._sizes)
        if level < present and quiet >= self._settle_seconds and self._late <= _FEW_LATE:
            reason = f"{level} would do on average for the last {self._settle_seconds:g} s"
            decision = self._change(now, present - 1, reason)
            self._has_settled = True
            return decision
        return None

    def spare(self, now: float, present: int) -> int:
        """Workers that another pool may have at once, since they can come back as fast."""
        if self._started_at is None:
            return 0
        if now - max(self._changed_at, self._started_at) < _LEND_SECONDS:
            return 0
        lately = max(size for at, size, _ in self._sizes if at >= now - _LEND_SECONDS)
        return max(0, present - lately)

    def lend(self, now: float, replicas: int, to: str) -> Decision:
        """Leaves the pool with `replicas`."""
        return self._change(now, replicas, f"{to} asks for more, and {replicas} do here")

    @property
    def _settle_seconds(self) -> float:
        down = self._config.down_seconds
        return min(self._patience * down, max(down, _LONGEST_MEMORY))

    def _change(self, now: float, replicas: int, reason: str) -> Decision:
        self._changed_at, self._has_settled = now, False
        return Decision(replicas, reason)

    def _learn(self, load: PoolLoad) -> None:
        if load.seconds <= 0:
            return
        self._seconds += load.seconds
        rate = load.prompt_tokens / load.seconds
        running = sum(w.requests_running + w.requests_waiting for w in load.workers)
        for i, span in enumerate(_SPANS):
            weight = self._weight(load.seconds, span)
            self._rates[i] += (rate - self._rates[i]) * weight
            self._running[i] += (running - self._running[i]) * weight
        if load.prompts:
            size = load.prompt_tokens / load.prompts
            self._prompt_size = self._prompt_size or size
            weight = self._weight(load.seconds, _SPANS[1])
            self._prompt_size += (size - self._prompt_size) * weight

    def _weight(self, seconds: float, span: float) -> float:
        """Of the newest of a moving average; a plain average until `span` has passed."""
        return max(-math.expm1(-seconds / span), seconds / self._seconds)

    def _needed(self, load: PoolLoad, present: int) -> _Need:
        """What asks for most. Bounds are nobody's load: nothing is spared for them."""
        needs = [_Need(0.0, 0.0, 0.0, "its bounds")]
        if load.workers and self._has_prefill:
            needs.append(self._for_prompts(load, present))
        if load.workers and self._has_decode:
            needs += [self._for_steps(load), self._for_blocks(load)]
        return _Need(
            max(need.grow for need in needs),
            max(need.keep for need in needs),
            max(need.level for need in needs),
            max(needs, key=lambda need: need.grow).reason,
        )

    # ------------------------------------------------------------ prefill

    def _for_prompts(self, load: PoolLoad, present: int) -> _Need:
        speeds = [w.prefill_tokens_per_second for w in load.workers if w.prefill_tokens_per_second]
        if not speeds:
            return _Need(0.0, 0.0, 0.0, "no prompt yet")
        speed = sum(speeds) / len(speeds)
        waiting = sum(w.waiting_prefill_tokens for w in load.workers)
        count = len(load.workers)
        slack = self._slack(speed)
        self._note_late(load, waiting / (speed * count) > slack)
        # More than half of the target to wait: too much, unless more workers are on their way.
        too_much = max(0.0, waiting - speed * count * (self._config.ttft_p90 or 1.0) / 2)
        self._backlogs.append(too_much if count >= present else 0.0)
        backlog = min(self._backlogs) if len(self._backlogs) == _PERSISTENT else 0.0
        # Of the first moments chance would say too much.
        rates = self._rates if self._seconds >= _SPANS[1] else [0.0] * len(_SPANS)
        full = speed * self._utilisation(speed, count)
        # What is too much for a short while may wait half of the target.
        grow = max(
            rate / (full + speed * slack / 2 / span)
            for rate, span in zip(self._ahead(rates), _SPANS, strict=True)
        )
        if backlog:
            grow = max(grow, (max(rates) + backlog / _DRAIN_SECONDS) / speed)
        reason = f"{max(rates):.0f} prompt tokens/s and {waiting} waiting, at {speed:.0f} a worker"
        is_known = self._seconds >= _SPANS[-1]
        if is_known and self._late > _TOO_MANY_LATE and count >= present and grow <= present:
            grow, reason = present + 1.0, f"{self._late:.0%} of the prompts met too long a queue"
        return _Need(grow, max(rates) / full, rates[-1] / full, reason)

    @staticmethod
    def _ahead(rates: Sequence[float]) -> Sequence[float]:
        """With what a rise that is more than chance will have become when a new worker is there,
        and without what is over."""
        short, soon, long = rates
        long = min(soon, long)
        if soon > _RISE * long:
            soon += soon - long  # the averages are 90 s apart, and late by 30 s
        return short, soon, long

    def _slack(self, speed: float) -> float:
        """Seconds that a prompt may wait within the target."""
        return max(0.0, (self._config.ttft_p90 or 1.0) - self._prompt_size / speed)

    def _note_late(self, load: PoolLoad, is_late: bool) -> None:
        left = math.exp(-load.seconds / _LATE_SPAN)
        self._prompts = self._prompts * left + load.prompts
        self._late_prompts = self._late_prompts * left + load.prompts * is_late

    @property
    def _late(self) -> float:
        """The share of prompts that met too long a queue."""
        return self._late_prompts / self._prompts if self._prompts else 0.0

    def _utilisation(self, speed: float, count: int) -> float:
        """The share of its time that a worker may compute so that nine of ten prompts meet the
        target. The wait of a queue with fixed service times (M/D/c, about M/D/1's by c) is
        exceeded by one in ten at 1.15 * service * load / (1 - load) / c."""
        if self._config.ttft_p90 is None or not self._prompt_size:
            return 0.7
        service = self._prompt_size / speed
        slack = max(0.0, self._config.ttft_p90 - service) * count / (1.15 * service)
        return min(max(slack / (1 + slack), _MIN_UTILISATION), _MAX_UTILISATION)

    # ------------------------------------------------------------- decode

    def _for_steps(self, load: PoolLoad) -> _Need:
        """So few sequences a worker that a step keeps to tpot_p90."""
        running = sum(w.requests_running + w.requests_waiting for w in load.workers)
        most = min(w.max_num_seqs for w in load.workers)
        target = self._config.tpot_p90
        measured = [w for w in load.workers if w.decode_step_seconds or w.decode_sequence_seconds]
        if target is not None and measured:
            step = max(w.decode_step_seconds for w in measured)
            each = max(w.decode_sequence_seconds for w in measured)
            fits = (target - step) / each if each > 0 else most
            most = max(1, min(most, math.floor(fits + 1e-9)))
        full = _FULL * most
        reason = f"{running} sequences, {most} a worker"
        averages = self._ahead(self._running)
        # The newest counts while they rise, and when it is more than chance.
        usual = self._running[1]
        counts = averages[1] > usual or running > usual + _CHANCE * math.sqrt(usual)
        grow = max(*averages, running if counts else 0) / full
        return _Need(grow, running / full, self._running[-1] / full, reason)

    def _for_blocks(self, load: PoolLoad) -> _Need:
        use = sum(w.kv_use for w in load.workers)
        needed = use / self._config.kv_use
        reason = f"KV of {use:.2f} workers in use, {self._config.kv_use:g} wanted"
        return _Need(needed, needed, needed, reason)


def _whole(workers: float) -> int:
    return math.ceil(workers - 1e-9)
