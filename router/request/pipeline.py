"""The life of one sequence: attempts on pairs of workers until its output is complete.

Before the first token an attempt that fails is simply made again elsewhere. After it the next
attempt resumes: it is given the tokens that were already emitted, computes them like prompt and
goes on behind them, with the same dice, since noise depends on (seed, position) alone. The reader
sees a pause, never a gap or a repeated token.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from core.block_hash import short_hash
from core.errors import PdserveError, RequestError
from core.logs import about
from core.types import FinishReason, GenerationRequest, SamplingParams
from router.access.caller import Caller
from router.direct import Direct
from router.placement.placer import Placement, Placer
from router.placement.policy import EXPECTED_OUTPUT, Demand
from router.placement.turnstile import Estimate, Turnstile
from router.request.attempt import Attempt, AttemptFailed, TokenBatch
from router.request.metrics import Metrics
from router.request.retry_budget import RetryBudget
from router.request.timeline import SequenceTimeline, Timeline

logger = logging.getLogger(__name__)

# A worker that died is replaced in seconds; a short wait spares the client an error.
FIRST_WAIT_S = 2.0
# Somebody is in the middle of an answer: worth the whole start of a fresh worker.
RESUME_WAIT_S = 60.0
_BACKOFF_S = (0.0, 0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate. `hashes` are of the prompt's full blocks, for placement alone."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    hashes: Sequence[bytes] = ()
    cache_salt: str = ""
    caller: Caller = Caller()


@dataclass(frozen=True, slots=True)
class Waits:
    """How long to look for a pair: for a request's first attempt, and for a later one."""

    first_s: float = FIRST_WAIT_S
    again_s: float = RESUME_WAIT_S


@dataclass(slots=True)
class SequenceStats:
    """What happened to one sequence, for usage, metrics and its timeline. Filled while it runs."""

    timeline: SequenceTimeline = field(
        default_factory=lambda: SequenceTimeline(Timeline("", "none"), 0)
    )
    num_cached_tokens: int | None = None  # of the prompt, in P's own prefix cache
    num_attempts: int = 0


class Pipeline:
    """Runs sequences on the registry's workers."""

    def __init__(
        self,
        placer: Placer,
        turnstile: Turnstile,
        budget: RetryBudget,
        metrics: Metrics,
        block_size: int,
        max_attempts: int,
        waits: Waits = Waits(),
    ) -> None:
        self._placer = placer
        self._turnstile = turnstile
        self._budget = budget
        self._metrics = metrics
        self._block_size = block_size
        self._max_attempts = max_attempts
        self._waits = waits

    async def generate(
        self,
        sequence: SequenceRequest,
        stats: SequenceStats,
        direct: Direct[TokenBatch] | None = None,
    ) -> AsyncGenerator[TokenBatch, None]:
        """Yields the output in batches; the last one has a finish reason. `direct` may get some
        between the first and the last. Closing the generator cancels both legs. Raises
        PdserveError when no attempt is left or the input is refused."""
        self._budget.add_request()
        names = [short_hash(value) for value in sequence.hashes]
        emitted: list[int] = []
        avoid: set[str] = set()

        def noted(batch: TokenBatch) -> TokenBatch:
            emitted.extend(batch.token_ids)
            return batch

        below = direct.after(noted) if direct is not None else None
        while len(emitted) < max(1, sequence.sampling.max_tokens):
            searched = stats.timeline.request.now()
            attempt = await self._begin(sequence, names, emitted, avoid, stats)
            stats.timeline.begin_attempt(attempt, searched, len(emitted))
            outcome = "cancelled"
            try:
                async with aclosing(attempt.tokens(below)) as batches:
                    async for batch in batches:
                        noted(batch)
                        _note_cached_tokens(attempt, sequence, stats)
                        if batch.finish_reason is not None:
                            outcome = "ok"
                        yield batch
                        if batch.finish_reason is not None:
                            return
            except AttemptFailed as failed:
                outcome = failed.error.message
                avoid.update(worker.incarnation for worker in failed.blamed)
                await self._after_failure(failed.error, attempt, stats, len(emitted))
            finally:
                self._metrics.observe_attempt(attempt)
                stats.timeline.end_attempt(outcome)
        # Every token had arrived; only the word that it was the last was lost.
        yield TokenBatch([], None, FinishReason.LENGTH)

    async def _begin(
        self,
        sequence: SequenceRequest,
        names: Sequence[int],
        emitted: list[int],
        avoid: set[str],
        stats: SequenceStats,
    ) -> Attempt:
        num_tokens = len(sequence.prompt_token_ids) + len(emitted)
        demand = Demand(
            num_tokens=num_tokens,
            max_new_tokens=sequence.sampling.max_tokens - len(emitted),
            block_size=self._block_size,
            session=sequence.caller.session or sequence.caller.user,
        )
        wait_s = self._waits.again_s if stats.num_attempts else self._waits.first_s
        if stats.num_attempts:  # it had its turn
            placement = await self._placer.place(demand, names, avoid, wait_s)
        else:
            placement = await self._take_turn(sequence.caller, demand, names, wait_s)
        stats.num_attempts += 1
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=sequence.prompt_token_ids,
            # The prompt's logprobs came with the first token.
            sampling=replace(sequence.sampling, prompt_logprobs=None)
            if emitted
            else sequence.sampling,
            output_token_ids=tuple(emitted),
            cache_salt=sequence.cache_salt,
            client_request_id=sequence.caller.request_id,
        )
        num_uncached = max(1, num_tokens - placement.cached_tokens)
        return Attempt(placement, request, num_uncached, sequence.caller.metadata, names)

    async def _take_turn(
        self, caller: Caller, demand: Demand, names: Sequence[int], wait_s: float
    ) -> Placement:
        """Places a request when it is its turn. Whatever is raised here no worker has heard of."""

        def estimate() -> Estimate:
            found = self._placer.look(demand, names)
            unknown = Estimate(num_tokens=demand.num_tokens)
            return unknown if found is None else found.estimate

        work = demand.num_tokens + min(demand.max_new_tokens, EXPECTED_OUTPUT)
        turnstile = self._turnstile
        try:
            async with turnstile.turn(caller.flow, caller.priority, work, estimate) as waited_s:
                placement = await self._placer.place(demand, names, (), wait_s)
                turnstile.check(waited_s, placement.estimate)
                return placement
        except PdserveError as error:
            self._metrics.count_rejection(error)
            raise

    async def _after_failure(
        self, error: PdserveError, attempt: Attempt, stats: SequenceStats, num_emitted: int
    ) -> None:
        """Returns if another attempt is due; raises `error` otherwise."""
        if isinstance(error, RequestError) or stats.num_attempts >= self._max_attempts:
            raise error
        if not self._budget.take():
            logger.error("no retries are left: too much is failing (%s)", error.message)
            raise error
        logger.warning(
            "attempt %s of request %s failed after %d tokens (%s): trying again",
            attempt.request_id, attempt.client_request_id or "-", num_emitted, error.message,
            extra=about(
                request_id=attempt.client_request_id, attempt_id=attempt.request_id,
                num_tokens=num_emitted, error=error.message,
            ),
        )  # fmt: skip
        self._metrics.count_retry(resumed=num_emitted > 0)
        await asyncio.sleep(_BACKOFF_S[min(stats.num_attempts - 1, len(_BACKOFF_S) - 1)])


def _note_cached_tokens(attempt: Attempt, sequence: SequenceRequest, stats: SequenceStats) -> None:
    """A hit is what the prefilling worker had itself, at the first attempt that says so.
    Blocks that D pulled from P are none."""
    if stats.num_cached_tokens is None:
        cached = attempt.num_cached_tokens
        if cached is not None:
            stats.num_cached_tokens = min(cached, len(sequence.prompt_token_ids))
