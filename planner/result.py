"""What a simulation leaves: one line for each request, and what follows from them."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, nan

from planner.job import Job


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds. A request attains it when both hold; one output token has no TPOT."""

    ttft: float
    tpot: float


class Recorder:
    """Counts and times."""

    def __init__(self) -> None:
        self.num_arrived = self.num_finished = self.num_rejected = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.arrived_tokens = 0  # of all prompts
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.indices, self.rejected_indices = array("q"), array("q")
        self.wait = array("d")  # from arrival to admission
        self.hand_over = array("d")  # from the first token to the decode batch
        self._gaps: Counter[int] = Counter()  # by the logarithm, in steps of one percent

    @property
    def num_inside(self) -> int:
        return self.num_arrived - self.num_finished - self.num_rejected

    def arrived(self, job: Job, now: float) -> None:
        self.num_arrived += 1
        self.arrived_tokens += job.request.num_prompt

    def admitted(self, job: Job, now: float) -> None:
        self.wait.append(now - job.arrival)

    def rejected(self, job: Job, now: float) -> None:
        """No worker could ever hold it."""
        self.num_rejected += 1
        self.rejected_indices.append(job.index)

    def finished(self, job: Job, now: float) -> None:
        self.num_finished += 1
        self.indices.append(job.index)
        self.prompt_tokens += job.request.num_prompt
        self.cached_tokens += job.num_cached
        self.output_tokens += job.num_emitted
        self.ttft.append(job.first_token_at - job.arrival)
        later = job.num_emitted - 1
        self.tpot.append((now - job.first_token_at) / later if later else 0.0)
        self.e2e.append(now - job.arrival)
        if job.decode_at >= 0:
            self.hand_over.append(job.decode_at - job.first_token_at)

    def gap(self, seconds: float, count: int) -> None:
        """`count` sequences waited so long for a token after their last one."""
        self._gaps[round(log(seconds) * 100)] += count

    def itl(self, percent: float) -> float:
        """A percentile of all gaps between tokens, within one percent; NaN without any."""
        left = self._gaps.total() * percent / 100
        for bucket in sorted(self._gaps):
            left -= self._gaps[bucket]
            if left <= 0:
                return exp(bucket / 100)
        return nan


@dataclass(frozen=True, slots=True)
class Result:
    """`busy`: the share of its time in which a pool's workers ran a step. `sizes`: from when on a
    pool wanted so many workers. All by pool."""

    recorder: Recorder
    duration: float  # simulated seconds, until the last request ended
    num_events: int
    busy: dict[str, float]
    worker_seconds: dict[str, float]
    sizes: dict[str, tuple[tuple[float, int], ...]]
    num_started: dict[str, int]  # after the beginning
    num_switched: dict[str, int]  # that came from the other pool

    @property
    def output_rate(self) -> float:
        return self.recorder.output_tokens / self.duration if self.duration else 0.0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that came from a prefix cache, as a share."""
        return self.recorder.cached_tokens / max(1, self.recorder.prompt_tokens)

    def attainment(self, slo: Slo, warm_up: float = 0.0) -> float:
        """The share of all requests that met both; a rejected one met neither. The first
        `warm_up` share of the arrivals, which found an empty system, does not count."""
        recorder = self.recorder
        first = int(recorder.num_arrived * warm_up)
        good = total = 0
        for index, ttft, tpot in zip(recorder.indices, recorder.ttft, recorder.tpot, strict=True):
            if index >= first:
                total += 1
                good += ttft <= slo.ttft and tpot <= slo.tpot
        total += sum(index >= first for index in recorder.rejected_indices)
        return good / max(1, total)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; NaN of nothing."""
    if not values:
        return nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
