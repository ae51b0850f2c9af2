"""The fast simulation of one worker: whole runs of decode steps in one event."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt

from planner.event_loop import EventLoop
from planner.job import Host, Job
from planner.prefix_cache import PrefixCache
from planner.shared_host import Pace
from planner.speeds import speeds_of
from planner.step_model import StepModel
from router.placement.policy import Load

_BLOCK = 16  # tokens of a KV block, for the policy's view


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker can hold and do. `chunked`: prompts are cut to the budget and share steps
    with decoding sequences; otherwise whole prompts run alone while the others wait."""

    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked: bool = True


class BatchWorker:
    """A queue of prompts, a decode batch and a KV budget.

    - Steps that compute prompts are simulated one by one. Between two changes of the batch,
      decode steps follow a line in the KV tokens, so the end of the run has a closed form and
      the run is one event; a newcomer cuts it at the end of the step in flight. Step times are
      the same as if each were simulated.
    - A sequence that decodes here reserves prompt and output at once. The real scheduler
      reserves the prompt and preempts when that was too little; `ScheduledWorker` has that.
    - The prefix cache is an LRU over block hashes of the size of the KV budget; running
      sequences do not shrink it.
    """

    def __init__(
        self,
        loop: EventLoop,
        model: StepModel,
        limits: Limits,
        host: Host,
        hash_block: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self._limits = limits
        self.busy_s = 0.0
        self._speeds = speeds_of(model, limits.max_num_batched_tokens)
        self._prefixes = PrefixCache(limits.kv_tokens // hash_block if hash_block else 0)
        self._loop, self._model, self._host = loop, model, host
        self._hash_block = hash_block
        self._room = limits.kv_tokens
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._reservations: deque[Job] = deque()
        self._landed: list[Job] = []  # decode from the next step on
        self._num_seqs = 0  # with room here: prefilling, reserved, decoding
        self._queued_tokens = 0
        # The decode batch: by the step in which each sequence ends.
        self._batch: list[tuple[int, int, Job]] = []
        self._kv = 0  # tokens that the next step attends to
        self._step = 0
        # What is in flight: nothing, one step, or a run of `_run_steps` decode steps.
        self._is_busy = False
        self._run_steps = 0
        self._run_start = 0.0
        self._run_id = 0
        self._stall_s = 0.0  # since the last decode step, spent on whole prompts
        self._pace = pace or Pace(loop)
        # A run goes on at another pace after the step in flight.
        self._pace.on_change = self._cut_run
        self._run_factor = 1.0

    # ------------------------------------------------------------- requests in

    def fits(self, job: Job, decodes: bool) -> bool:
        """Whether it could run in an empty worker."""
        return _need(job, decodes) <= self._limits.kv_tokens

    def add_prompt(self, job: Job) -> None:
        self._waiting.append(job)
        self._queued_tokens += job.request.num_prompt
        if self._has_room(self._waiting[0], not job.hands_over):
            self._wake()

    def reserve(self, job: Job) -> None:
        """Waits for room for the KV of a job that another worker prefills."""
        self._reservations.append(job)
        self._grant()

    def start_decode(self, job: Job) -> None:
        """The KV of a job that has a reservation is here."""
        self._landed.append(job)
        self._wake()

    def release(self, job: Job) -> None:
        """A peer has the KV of a job that was prefilled here."""
        self._room += _need(job, False)
        self._wake()

    def load(self, hashes: Sequence[bytes]) -> Load:
        waiting = len(self._waiting) + len(self._reservations)
        return Load(
            queued_tokens=self._queued_tokens,
            num_requests=self._num_seqs + waiting,
            free_blocks=self._room // _BLOCK,
            total_blocks=self._limits.kv_tokens // _BLOCK,
            max_num_seqs=self._limits.max_num_seqs,
            cached_tokens=self._prefixes.match(hashes) * self._hash_block,
            last_chosen=0,  # the deployment knows it
            speeds=self._speeds,
            step_tokens=self._limits.max_num_batched_tokens,
        )

    # ---------------------------------------------------------------- stepping

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            # Through the loop: whoever arrives at the same moment shares the step.
            self._loop.at(self._loop.now, self._begin)
        else:
            self._cut_run()

    def _begin(self, _: None) -> None:
        for job in self._landed:
            self._join(job)
        self._landed.clear()
        self._admit()
        if self._prefilling:
            self._begin_step()
        elif self._batch:
            self._begin_run()
        else:
            self._is_busy = False
        self._pace.set_busy(self._is_busy)

    def _begin_step(self) -> None:
        batch, kv = (len(self._batch), self._kv) if self._limits.chunked else (0, 0)
        chunks, pairs = self._chunks(self._limits.max_num_batched_tokens - batch)
        new = sum(num_tokens for _, num_tokens in chunks)
        self._run_start = self._loop.now
        self._pace.begin(self._model.step(new, pairs, batch, kv), self._end_step, chunks)

    def _chunks(self, budget: int) -> tuple[list[tuple[Job, int]], float]:
        chunks: list[tuple[Job, int]] = []
        pairs = 0.0
        for job in self._prefilling:
            num_tokens = job.request.num_prompt - job.num_computed
            if self._limits.chunked:
                num_tokens = min(num_tokens, budget)
            elif chunks and num_tokens > budget:
                break
            if num_tokens <= 0:
                break
            budget -= num_tokens
            pairs += num_tokens * job.num_computed + num_tokens * num_tokens / 2
            chunks.append((job, num_tokens))
        return chunks, pairs

    def _end_step(self, chunks: list[tuple[Job, int]]) -> None:
        seconds, batch = self._loop.now - self._run_start, len(self._batch)
        self.busy_s += seconds
        if not self._limits.chunked:
            self._stall_s += seconds if batch else 0.0
        elif batch:
            self._host.gap(seconds, batch)
        if self._limits.chunked:
            self._step += 1
            self._kv += len(self._batch)
        for job, num_tokens in chunks:
            job.num_computed += num_tokens
            self._queued_tokens -= num_tokens
            if job.num_computed == job.request.num_prompt:
                job.last_chunk = num_tokens
                self._prefilling.remove(job)
                self._end_prefill(job)
        self._retire()
        self._begin(None)

    def _end_prefill(self, job: Job) -> None:
        self._prefixes.add(job.request.hashes)
        if job.hands_over:
            self._num_seqs -= 1
            self._host.first_token(job)
            if job.request.num_output == 1:  # nobody will ask for its KV
                self._room += _need(job, False)
                job.num_emitted = 1
                self._host.done(job)
        else:
            self._host.first_token(job)
            self._join(job)

    def _begin_run(self) -> None:
        self._run_steps = self._batch[0][0] - self._step
        self._run_start = self._loop.now
        self._run_factor = self._pace.factor
        self._run_id += 1
        self._loop.at(self._time_of(self._run_steps), self._end_run, self._run_id)

    def _time_of(self, num_steps: int) -> float:
        """When so many steps of the present run are over."""
        batch = len(self._batch)
        fixed, per_kv = self._model.decode(batch)
        growth = per_kv * batch * num_steps * (num_steps - 1) / 2
        seconds = num_steps * (fixed + per_kv * self._kv) + growth
        return self._run_start + self._run_factor * seconds

    def _cut_run(self) -> None:
        """Ends the run, if there is one, with the step that is in flight."""
        if not self._run_steps:
            return
        elapsed = (self._loop.now - self._run_start) / self._run_factor
        batch = len(self._batch)
        fixed, per_kv = self._model.decode(batch)
        half = per_kv * batch / 2
        linear = fixed + per_kv * self._kv - half
        root = 2 * elapsed / (linear + sqrt(linear * linear + 4 * half * elapsed))
        num_steps = min(int(root) + 1, self._run_steps)
        if num_steps < self._run_steps:
            self._run_steps = num_steps
            self._run_id += 1  # the event that is in the heap means nothing any more
            self._loop.at(self._time_of(num_steps), self._end_run, self._run_id)

    def _end_run(self, run_id: int) -> None:
        if run_id != self._run_id:
            return
        seconds = self._loop.now - self._run_start
        self.busy_s += seconds
        self._tell_gaps(seconds / self._run_steps)
        self._step += self._run_steps
        self._kv += self._run_steps * len(self._batch)
        self._run_steps = 0
        self._retire()
        self._begin(None)

    def _tell_gaps(self, step_s: float) -> None:
        batch, num_steps = len(self._batch), self._run_steps
        if self._stall_s:  # whole prompts ran before the first step
            self._host.gap(self._stall_s + step_s, batch)
            self._stall_s, num_steps = 0.0, num_steps - 1
        if num_steps:
            self._host.gap(step_s, batch * num_steps)

    # ------------------------------------------------------- room and the batch

    def _has_room(self, job: Job, decodes: bool) -> bool:
        return self._num_seqs < self._limits.max_num_seqs and _need(job, decodes) <= self._room

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0], not self._waiting[0].hands_over):
            job = self._waiting.popleft()
            self._num_seqs += 1
            self._room -= _need(job, not job.hands_over)
            # The last token is computed here: its logits are needed.
            known = self._prefixes.match(job.request.hashes) * self._hash_block
            job.num_cached = job.num_computed = min(known, job.request.num_prompt - 1)
            self._queued_tokens -= job.num_cached
            self._prefilling.append(job)
            self._host.admitted(job)

    def _grant(self) -> None:
        while self._reservations and self._has_room(self._reservations[0], True):
            job = self._reservations.popleft()
            self._num_seqs += 1
            self._room -= _need(job, True)
            self._host.reserved(job)

    def _join(self, job: Job) -> None:
        """The first token exists; each further one takes a step."""
        job.decode_at = self._loop.now
        heappush(self._batch, (self._step + job.request.num_output - 1, job.index, job))
        self._kv += job.request.num_prompt + 1

    def _retire(self) -> None:
        batch = self._batch
        while batch and batch[0][0] <= self._step:
            _, _, job = heappop(batch)
            self._kv -= job.request.num_prompt + job.request.num_output
            self._room += _need(job, True)
            self._num_seqs -= 1
            job.num_emitted = job.request.num_output
            self._host.done(job)
        self._grant()


def _need(job: Job, decodes: bool) -> int:
    """Tokens of KV that a job reserves."""
    return job.request.num_prompt + (job.request.num_output if decodes else 1)
