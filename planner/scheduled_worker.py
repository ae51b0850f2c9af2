"""The exact simulation of one worker: the engine's own scheduler, asked for every step."""

import zlib
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any

from core.config import EngineConfig
from core.types import GenerationRequest, SamplingParams
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence, SequenceState
from planner.batch_worker import Limits
from planner.event_loop import EventLoop
from planner.job import Host, Job
from planner.prefix_cache import PrefixCache
from planner.shared_host import Pace
from planner.speeds import speeds_of
from planner.step_model import StepModel
from router.placement.policy import Load

_BLOCK = 16
_WRITTEN = 0  # the token id of everything that is "generated"


class ScheduledWorker:
    """Drives `engine.scheduler.Scheduler` as the engine does, with a clock instead of a model.

    What comes from outside while a step is in flight waits for its end, as in the engine's loop.
    Preemption, block granularity and prefix hits are the scheduler's own. Prompts are token ids
    made from the trace's block hashes, so that equal hashes are equal blocks.
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
        self.block_size = hash_block or _BLOCK
        num_blocks = max(2, limits.kv_tokens // self.block_size)
        self._prefixes = PrefixCache(num_blocks if hash_block else 0)
        config = EngineConfig(
            block_size=self.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_kv_blocks=num_blocks,
            enable_prefix_caching=hash_block > 0,
        )
        self.scheduler = Scheduler(config, BlockPool(num_blocks, hash_block > 0))
        self._loop, self._model, self._host = loop, model, host
        self._jobs: dict[str, Job] = {}
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = count()
        self._inbox: list[tuple[Any, Job]] = []
        self._is_busy = False
        self._pace = pace or Pace(loop)
        self._step_start = 0.0

    # ------------------------------------------------------------- requests in

    def fits(self, job: Job, decodes: bool) -> bool:
        tokens = job.request.num_prompt + (job.request.num_output if decodes else 1)
        return -(-tokens // self.block_size) < self.scheduler.pool.num_blocks

    def add_prompt(self, job: Job) -> None:
        self._send(self._add_prompt, job)

    def reserve(self, job: Job) -> None:
        self._send(self._add_remote, job)

    def start_decode(self, job: Job) -> None:
        self._send(self._start_decode, job)

    def release(self, job: Job) -> None:
        self._send(self._release, job)

    def load(self, hashes: SequenceOf[bytes]) -> Load:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + len(scheduler.waiting_remote)
        unseen = [j for what, j in self._inbox if what in (self._add_prompt, self._add_remote)]
        prompts = sum(j.request.num_prompt for j in unseen if j.prefill is self)
        return Load(
            queued_tokens=scheduler.num_waiting_prefill_tokens + prompts,
            num_requests=len(scheduler.running) + len(scheduler.awaiting) + waiting + len(unseen),
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.num_blocks,
            max_num_seqs=self._limits.max_num_seqs,
            cached_tokens=self._prefixes.match(hashes) * self.block_size,
            last_chosen=0,  # the deployment knows it
            speeds=self._speeds,
            step_tokens=self._limits.max_num_batched_tokens,
        )

    def _send(self, what: Any, job: Job) -> None:
        self._inbox.append((what, job))
        if not self._is_busy:
            self._is_busy = True
            self._loop.at(self._loop.now, self._begin)

    def _add_prompt(self, job: Job) -> None:
        self._add(job, hands_over=job.hands_over, is_remote=False)

    def _add_remote(self, job: Job) -> None:
        self._add(job, hands_over=False, is_remote=True)

    def _add(self, job: Job, hands_over: bool, is_remote: bool) -> None:
        request = GenerationRequest(
            str(job.index),
            tuple(_token_ids(job, self.block_size)),
            SamplingParams(max_tokens=job.request.num_output),
        )
        seq = Sequence(
            request,
            next(self._arrivals),
            self._loop.now,
            prefill_only=hands_over,
            hold=hands_over,
            wants_remote_kv=is_remote,
        )
        self._jobs[seq.request_id] = job
        self._sequences[seq.request_id] = seq
        self.scheduler.add(seq)

    def _start_decode(self, job: Job) -> None:
        seq = self._sequences[str(job.index)]
        job.decode_at = self._loop.now
        self.scheduler.start_decode(seq)
        seq.token_ids.append(_WRITTEN)  # the first token, which the peer has emitted

    def _release(self, job: Job) -> None:
        self._end(self._sequences[str(job.index)])

    # ---------------------------------------------------------------- stepping

    def _begin(self, _: None) -> None:
        while True:
            # Admissions below may bring more letters; only a step makes them wait.
            inbox, self._inbox = self._inbox, []
            for what, job in inbox:
                what(job)
            plan = self.scheduler.schedule()
            for seq in plan.admitted:
                self._tell_admitted(seq)
            if plan.steps:
                break
            if not plan.made_progress and not self._inbox:
                self._is_busy = False
                self._pace.set_busy(False)
                return
        self._step_start = self._loop.now
        self._pace.set_busy(True)
        self._pace.begin(self._seconds(plan), self._end_step, plan)

    def _tell_admitted(self, seq: Sequence) -> None:
        job = self._jobs[seq.request_id]
        if seq.state is SequenceState.AWAITING:
            self._host.reserved(job)
        else:
            job.num_cached = seq.num_cached_tokens
            self._host.admitted(job)

    def _seconds(self, plan: StepPlan) -> float:
        new, pairs, kv = 0, 0.0, 0
        for index, (seq, num_tokens) in enumerate(plan.steps):
            if index < plan.num_decodes:
                kv += seq.num_computed_tokens + 1
            else:
                new += num_tokens
                pairs += num_tokens * (seq.num_computed_tokens + num_tokens / 2)
        return self._model.step(new, pairs, plan.num_decodes, kv)

    def _end_step(self, plan: StepPlan) -> None:
        seconds = self._loop.now - self._step_start
        self.busy_s += seconds
        if plan.num_decodes:
            self._host.gap(seconds, plan.num_decodes)
        for seq, num_tokens in plan.steps:
            self.scheduler.advance(seq, num_tokens)
            if seq.num_uncomputed_tokens == 0:
                self._emit(seq, num_tokens)
        self._begin(None)

    def _emit(self, seq: Sequence, num_tokens: int) -> None:
        job = self._jobs[seq.request_id]
        seq.token_ids.append(_WRITTEN)
        is_last = seq.num_output_tokens >= job.request.num_output
        if seq.num_output_tokens == 1:
            job.num_computed, job.last_chunk = job.request.num_prompt, num_tokens
            self._prefixes.add(job.request.hashes)
            if seq.prefill_only and not is_last:
                self.scheduler.hold(seq)
            else:
                job.decode_at = self._loop.now
            self._host.first_token(job)
        if is_last:
            job.num_emitted = seq.num_output_tokens
            self._end(seq)
            self._host.done(job)

    def _end(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        del self._sequences[seq.request_id]
        del self._jobs[seq.request_id]


def _token_ids(job: Job, block_size: int) -> list[int]:
    num_prompt = job.request.num_prompt
    if not job.request.hashes:
        return [_WRITTEN] * num_prompt
    ids: list[int] = []
    for name in job.request.hashes:
        ids += [1 + zlib.crc32(name) % 0xFFFFFFFE] * block_size
    # A trace may name fewer blocks than its prompt fills.
    return (ids + [_WRITTEN] * num_prompt)[:num_prompt]
