"""From a validated request to text: one stream of deltas for each choice.

Text exists here and above; below are token ids. Both HTTP and gRPC read the same deltas.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from core.block_hash import block_hashes
from core.errors import PdserveError
from core.types import FinishReason, SamplingParams, TokenLogprobs
from router.access.caller import Caller
from router.chat.output import ReadingPlan
from router.direct import Direct
from router.request.attempt import TokenBatch
from router.request.metrics import Metrics
from router.request.pipeline import Pipeline, SequenceRequest, SequenceStats
from router.request.timeline import Timeline, Timelines
from router.text.detokenizer import IncrementalDetokenizer
from router.text.tokenizer import Tokenizer

SEED_MASK = (1 << 64) - 1
# Deltas that a choice may be ahead of the client before its workers are slowed down.
_QUEUE_PER_CHOICE = 4


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a client asked for, with every default resolved. Choice `i * n + k` is sample `k` of
    prompt `i`; its seed is the request's plus its index."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    cache_salt: str = ""
    caller: Caller = Caller()
    # Of a chat whose answer is more than content, and special tokens that tell the parts apart.
    reading: ReadingPlan | None = None
    shown_special: frozenset[int] = frozenset()
    echo: bool = False  # a choice's text begins with its prompt

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(slots=True)  # not frozen: one is made for each token, and that takes twice as long
class Delta:
    """What is new in one choice. Token ids and logprobs cover every output token
    once, stop tokens included; text does not show stop tokens or what follows a stop string."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    # Of the prompt from its second token on; with a choice's first delta, if asked for.
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """One request while it runs. `usage` is complete when `deltas()` has ended."""

    def __init__(
        self,
        request: TextRequest,
        tokenizer: Tokenizer,
        pipeline: Pipeline,
        metrics: Metrics,
        block_size: int,
        timelines: Timelines,
        timeline: Timeline,
    ) -> None:
        self.request = request
        self.timeline = timeline
        self._timelines = timelines
        self.usage = Usage(prompt_tokens=sum(map(len, request.prompts)))
        self._tokenizer = tokenizer
        self._pipeline = pipeline
        self._metrics = metrics
        self._block_size = block_size
        self._knows_cached = False
        self._stats = [SequenceStats(own) for own in timeline.add_sequences(request.num_choices)]

    async def deltas(self, direct: Direct[Delta] | None = None) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices, each choice's in order. Closing it aborts every choice; the
        first choice that fails ends them all. `direct` may get those of a single choice between
        its first and its last. Raises PdserveError."""
        outcome = "cancelled"
        self.timeline.num_prompt_tokens = self.usage.prompt_tokens
        self._timelines.keep(self.timeline)
        try:
            below = None
            if direct is not None and self.request.num_choices == 1:
                below = direct.after(self._counted)
            choices = [self._choice(i, h, below) for i, h in enumerate(self._hashes())]
            source = choices[0] if len(choices) == 1 else _merged(choices)
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    yield self._counted(delta)
            outcome = "ok"
        except PdserveError as error:
            outcome = error.message
            raise
        finally:
            self._update_cached()
            usage = self.usage
            self.timeline.end(outcome)
            self._metrics.count_usage(
                usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            )
            account = self.request.caller.account
            if account is not None:
                account.spend_tokens(usage.prompt_tokens + usage.completion_tokens)

    def _counted(self, delta: Delta) -> Delta:
        self.usage.completion_tokens += len(delta.token_ids)
        if not self._knows_cached:
            self._update_cached()
        return delta

    def _hashes(self) -> list[Sequence[bytes]]:
        """Block hashes for each choice. The last prompt token is always computed, so it is in no
        block that could be a hit."""
        request = self.request
        by_prompt = [
            block_hashes(prompt[:-1], self._block_size, request.cache_salt)
            for prompt in request.prompts
        ]
        return [hashes for hashes in by_prompt for _ in range(request.n)]

    def _update_cached(self) -> None:
        """A prompt's samples may find what the first of them has just computed: the least hit
        among them is what was there before this request."""
        n = self.request.n
        total = 0
        self._knows_cached = all(stats.num_cached_tokens is not None for stats in self._stats)
        for start in range(0, len(self._stats), n):
            known = [
                stats.num_cached_tokens
                for stats in self._stats[start : start + n]
                if stats.num_cached_tokens is not None
            ]
            total += min(known, default=0)
        self.usage.cached_tokens = self.timeline.num_cached_tokens = total

    async def _choice(
        self, index: int, hashes: Sequence[bytes], direct: Direct[Delta] | None
    ) -> AsyncGenerator[Delta, None]:
        request = self.request
        sampling = replace(request.sampling, seed=(request.sampling.seed + index) & SEED_MASK)
        sequence = SequenceRequest(
            prompt_token_ids=request.prompts[index // request.n],
            sampling=sampling,
            hashes=hashes,
            cache_salt=request.cache_salt,
            caller=request.caller,
        )
        text_of = _ChoiceText(self._tokenizer, request)
        prompt, skip = sequence.prompt_token_ids, request.skip_special_tokens
        echo = self._tokenizer.decode(prompt, skip) if request.echo else ""
        timeline = self._stats[index].timeline
        clock = self._metrics.clock(timeline)

        def delta_of(batch: TokenBatch) -> Delta:
            if batch.token_ids:
                timeline.tick(len(batch.token_ids))
                clock.tick()
            text, used, finish = text_of.add(batch.token_ids, batch.finish_reason)
            logprobs = batch.logprobs[:used] if batch.logprobs is not None else None
            if finish is not None:
                timeline.finish(finish)
                clock.finish()
            ids = batch.token_ids[:used]
            return Delta(index, text, ids, logprobs, finish, batch.prompt_logprobs)

        below = None
        if direct is not None and not request.stop:  # any token may end a text with stop strings
            below = direct.after(delta_of)
        source = self._pipeline.generate(sequence, self._stats[index], below)
        async with aclosing(source) as batches:
            async for batch in batches:
                delta = delta_of(batch)
                delta.text, echo = echo + delta.text, ""
                yield delta
                if delta.finish_reason is not None:
                    return


class _ChoiceText:
    """Turns one choice's tokens into text and finds its end."""

    def __init__(self, tokenizer: Tokenizer, request: TextRequest) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            request.stop,
            request.skip_special_tokens,
            shown_special=request.shown_special,
        )
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._num_used = 0

    def add(self, token_ids: list[int], reason: FinishReason | None) -> tuple[str, int, str | None]:
        """New text, how many of the tokens belong to the answer, and why it ended, if it did."""
        detokenizer = self._detokenizer
        # EOS or a stop token is counted, not shown. A grammar may also end with its last letter.
        is_shown = not (
            reason is FinishReason.STOP and token_ids and token_ids[-1] in self._stop_token_ids
        )
        text = detokenizer.push(token_ids if is_shown else token_ids[:-1])
        if reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped:
            num_used = max(0, detokenizer.num_tokens_used - self._num_used)
            return text, num_used, FinishReason.STOP.value
        self._num_used += len(token_ids)
        return text, len(token_ids), reason.value if reason is not None else None


async def _merged(choices: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """All choices as they come. The queue is bounded: a slow reader slows the workers down."""
    queue: asyncio.Queue[Any] = asyncio.Queue(_QUEUE_PER_CHOICE * len(choices))

    async def pump(choice: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(choice) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
