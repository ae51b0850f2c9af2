"""How many workers a pool should have. No I/O and no clock: the controller and the planner's
simulation call the same code.

Prefill is sized by prompt tokens a second and by what waits, decode by running sequences, the
time of a step and KV in use; each from speeds that the pool's own workers measured. A pool grows
at once, by a bounded factor, and shrinks only when the whole `down_seconds` before would have done
with less.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from core.config import AutoscaleConfig

# Arrivals are averaged over both and the larger counts: a rise is seen early, a gap late.
_RATE_SECONDS = (10.0, 30.0)
_MIN_UTILISATION, _MAX_UTILISATION = 0.3, 0.9
_GROWTH = 2.0  # at most so many times the workers of now, or as small a part, in one step
_DRAIN_SECONDS = 10.0  # in which what waits too long should be gone
_SPARE = 1.25  # a pool shrinks only to a size that would do for so much more load
_PERSISTENT = 3  # a backlog counts once it was there at so many looks in a row


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


class Autoscaler:
    """Holds one pool at its targets. Owns the memory that keeps it from swinging."""

    def __init__(self, config: AutoscaleConfig, has_prefill: bool, has_decode: bool) -> None:
        self._config = config
        self._has_prefill, self._has_decode = has_prefill, has_decode
        self._rates = [0.0] * len(_RATE_SECONDS)  # prompt tokens a second
        self._seconds = 0.0  # that were looked at
        self._prompt_size = 0.0
        self._sizes: deque[tuple[float, int]] = deque()  # that would have done, of down_seconds
        self._backlogs: deque[float] = deque(maxlen=_PERSISTENT)
        self._changed_at = -math.inf
        self._started_at: float | None = None

    def decide(self, now: float, present: int, load: PoolLoad) -> Decision:
        """`now`: any clock's seconds, never going back; `present`: replicas that are wanted now,
        whether or not they are all there."""
        if self._started_at is None:
            self._started_at = now
        self._learn(load)
        needed, reason = self._needed(load, present)
        self._sizes.append((now, self._config.bounded(_whole(needed * _SPARE))))
        while self._sizes[0][0] < now - self._config.down_seconds:
            self._sizes.popleft()
        wish = self._config.bounded(_whole(needed))
        if wish > present and now - self._changed_at >= self._config.up_seconds:
            most = max(present + 1, math.floor(present * _GROWTH))
            return self._change(now, min(wish, most), reason)
        lately = max(size for _, size in self._sizes)
        quiet_since = max(self._changed_at, self._started_at)
        if lately < present and now - quiet_since >= self._config.down_seconds:
            fewer = max(lately, math.ceil(present / _GROWTH))
            reason = f"{lately} would do for the last {self._config.down_seconds:g} s"
            return self._change(now, fewer, reason)
        return Decision(self._config.bounded(present), "its bounds")

    def _change(self, now: float, replicas: int, reason: str) -> Decision:
        self._changed_at = now
        return Decision(replicas, reason)

    def _learn(self, load: PoolLoad) -> None:
        if load.seconds <= 0:
            return
        self._seconds += load.seconds
        rate = load.prompt_tokens / load.seconds
        for i, span in enumerate(_RATE_SECONDS):
            self._rates[i] += (rate - self._rates[i]) * self._weight(load.seconds, span)
        if load.prompts:
            size = load.prompt_tokens / load.prompts
            self._prompt_size = self._prompt_size or size
            weight = self._weight(load.seconds, _RATE_SECONDS[-1])
            self._prompt_size += (size - self._prompt_size) * weight

    def _weight(self, seconds: float, span: float) -> float:
        """Of the newest of a moving average; a plain average until `span` has passed."""
        return max(-math.expm1(-seconds / span), seconds / self._seconds)

    def _needed(self, load: PoolLoad, present: int) -> tuple[float, str]:
        """Workers, not rounded yet, and what asks for most of them."""
        needs = [(0.0, "its bounds")]  # which are nobody's load: nothing is spared for them
        if load.workers and self._has_prefill:
            needs.append(self._for_prompts(load, present))
        if load.workers and self._has_decode:
            needs += [self._for_steps(load), self._for_blocks(load)]
        return max(needs, key=lambda need: need[0])

    # ------------------------------------------------------------ prefill

    def _for_prompts(self, load: PoolLoad, present: int) -> tuple[float, str]:
        speeds = [w.prefill_tokens_per_second for w in load.workers if w.prefill_tokens_per_second]
        if not speeds:
            return 0.0, "no prompt yet"
        # Of the first moments chance would say too much.
        rate = max(self._rates) if self._seconds >= _RATE_SECONDS[0] else 0.0
        speed = sum(speeds) / len(speeds)
        waiting = sum(w.waiting_prefill_tokens for w in load.workers)
        count = len(load.workers)
        # More than half of the target to wait: too much, unless more workers are on their way.
        too_much = max(0.0, waiting - speed * count * (self._config.ttft_p90 or 1.0) / 2)
        self._backlogs.append(too_much if count >= present else 0.0)
        backlog = min(self._backlogs) if len(self._backlogs) == _PERSISTENT else 0.0
        needed = rate / (speed * self._utilisation(speed, count))
        behind = (rate + backlog / _DRAIN_SECONDS) / speed if backlog else 0.0
        return max(needed, behind), (
            f"{rate:.0f} prompt tokens/s and {waiting} waiting, at {speed:.0f} a worker"
        )

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

    def _for_steps(self, load: PoolLoad) -> tuple[float, str]:
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
        # One in ten steps may meet a fuller batch than the average.
        return running / (0.9 * most), f"{running} sequences, {most} a worker"

    def _for_blocks(self, load: PoolLoad) -> tuple[float, str]:
        use = sum(w.kv_use for w in load.workers)
        return (
            use / self._config.kv_use,
            f"KV of {use:.2f} workers in use, {self._config.kv_use:g} wanted",
        )


def _whole(workers: float) -> int:
    return math.ceil(workers - 1e-9)
