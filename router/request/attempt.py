"""One attempt: both legs of one sequence on one placement.

    Prefill  --started------first token......|  open until D has the KV
    Decode   ...waits, pulls.................--started--tokens---tokens(finish)--|

The legs are coupled: when one fails, the other is cancelled at once, and a cancelled Prefill frees
its blocks. The first token comes from P and the rest from D, in order and without a gap; an
attempt that resumes an output starts at its end. A first token that is the last never starts a
decode step.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import grpc

from core.errors import (
    CancelledByPeerError,
    HandoverError,
    IncompatiblePeerError,
    OverloadedError,
    PdserveError,
    RequestError,
    StalePeerError,
    UnavailableError,
)
from core.types import FinishReason, GenerationRequest, TokenLogprobs
from router.direct import Direct
from router.placement.placer import Placement
from router.placement.policy import EXPECTED_OUTPUT
from router.placement.step_stream import Inbox, Item
from router.placement.worker import Worker
from rpc import codec, worker_pb2
from rpc.status import error_from_rpc

# When a leg complains of its peer, the peer's own error is the real cause and a moment behind.
_CAUSE_WAIT_S = 0.1
# From D's word that it has sent the last token to that token. They come on two connections, and a
# router that is short of time may read one long before the other.
_LAST_TOKENS_S = 60.0
Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)  # not frozen: one is made for each token, and that takes twice as long
class TokenBatch:
    """New tokens of one sequence, never changed. A finish reason comes with the last batch alone,
    and the prompt's logprobs, from its second token on, with the first."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""  # of the prompt, if asked for, with the finish reason


class AttemptFailed(Exception):
    """An attempt ended early. `blamed` are the workers that another attempt should avoid."""

    def __init__(self, error: PdserveError, blamed: tuple[Worker, ...]) -> None:
        super().__init__(error.message)
        self.error = error
        self.blamed = blamed


class Attempt:
    """Owns both calls: when `tokens()` has ended, for whatever reason, neither is open, and so
    neither worker holds anything for this attempt."""

    def __init__(
        self,
        placement: Placement,
        request: GenerationRequest,
        num_uncached: int,
        metadata: Metadata = (),
        block_names: Sequence[int] = (),
    ) -> None:
        """`num_uncached`: tokens to prefill. `metadata` goes along with both calls. `block_names`
        are of the KV blocks that both workers will hold."""
        self.placement = placement
        self._metadata = metadata
        self._block_names = block_names
        self.prefill_started: worker_pb2.PrefillStarted | None = None
        self.prefilled: worker_pb2.FirstToken | None = None
        self.decode_started: worker_pb2.DecodeStarted | None = None
        self.first_step: worker_pb2.DecodeStep | None = None  # of D, after a hand-over
        self._request = request
        self._num_uncached = num_uncached
        self._due = len(request.output_token_ids)  # index of the next token
        self._has_scored = False
        self._prompt_logprobs: list[TokenLogprobs] = []  # that have come so far
        self._lost: AttemptFailed | None = None
        self._prefill_call: grpc.aio.UnaryStreamCall | None = None
        self._decode_call: grpc.aio.UnaryStreamCall | None = None
        # D's next event, when it is read ahead of its turn.
        self._decode_read: asyncio.Future[Any] | None = None
        # Where tokens come by the worker's steps, unless it sends them on the call itself.
        self._inbox: Inbox | None = None
        self._step_number = 0
        self._decode_rest: asyncio.Task[None] | None = None  # then reads D's call to its end
        # Reads P's call to its end, once the first token is there.
        self._prefill_rest: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def client_request_id(self) -> str:
        return self._request.client_request_id

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the prefilling worker found in its own prefix cache, once known."""
        if self.placement.prefill is None:
            return None if self.decode_started is None else self.decode_started.num_cached_tokens
        return None if self.prefill_started is None else self.prefill_started.num_cached_tokens

    def lose(self, worker: Worker, error: UnavailableError) -> None:
        """Called when `worker` is known to be gone: ends the attempt now, unless the worker has
        done its part. What D says it has started with is released by P."""
        if worker is self.placement.prefill and self.decode_started is not None:
            return
        self._end_with(AttemptFailed(error, (worker,)))

    def _end_with(self, failed: AttemptFailed) -> None:
        if self._lost is None:
            self._lost = failed
            self._cancel()
            if self._inbox is not None:
                self._inbox.fail(failed)

    async def tokens(
        self, direct: Direct[TokenBatch] | None = None
    ) -> AsyncGenerator[TokenBatch, None]:
        """The output from `len(output_token_ids)` on. `direct` may get batches between the first
        and the last. Raises AttemptFailed."""
        prefill, decode = self.placement.prefill, self.placement.decode
        with ExitStack() as counted:
            for worker in self.placement.workers:
                counted.enter_context(worker.carrying(self, self._num_blocks(worker)))
                counted.enter_context(worker.expecting(self._block_names))
            queued = counted.enter_context(ExitStack())
            queued.enter_context((prefill or decode).prefilling(self._num_uncached))
            is_first_seen = False
            steps = decode.steps
            # Scores come on the call, and before the tokens.
            if steps.stream_id and self._request.sampling.prompt_logprobs is None:
                self._inbox = Inbox()
                receiving = steps.receiving(self.request_id, self._inbox)
                self._step_number = counted.enter_context(receiving)
            try:
                self._open()
                if prefill is not None:
                    first = await self._first_token(prefill)
                    queued.close()
                    is_first_seen = True
                    yield first
                    if first.finish_reason is not None:
                        return
                    self._prefill_rest = asyncio.ensure_future(self._hand_over(prefill))
                if self._inbox is not None:
                    decoded = self._decoded_by_steps(decode, self._inbox, direct)
                else:
                    decoded = self._decoded_by_call(decode)
                async for batch in decoded:
                    if not is_first_seen:
                        queued.close()
                        is_first_seen = True
                    yield batch
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._lost is None or (task is not None and task.cancelling()):
                    raise
                raise self._lost from None
            finally:
                await self._close()

    def _num_blocks(self, worker: Worker) -> int:
        assert worker.info is not None
        tokens = len(self._request.token_ids)
        if worker is self.placement.decode:
            tokens += min(self._request.sampling.max_tokens, EXPECTED_OUTPUT)
        return -(-tokens // worker.info.block_size)

    def _open(self) -> None:
        prefill, decode = self.placement.prefill, self.placement.decode
        request = codec.request_to_pb(self._request)
        is_last = self._due + 1 >= self._request.sampling.max_tokens
        source = None
        if prefill is not None:
            source = prefill.peer_address()
            self._prefill_call = prefill.prefill.Prefill(
                worker_pb2.PrefillRequest(
                    request=request, incarnation=prefill.incarnation, hand_over=not is_last
                ),
                metadata=self._metadata,
            )
        if prefill is None or not is_last:
            if prefill is not None:
                request.sampling.ClearField("prompt_logprobs")  # P reports them
            self._decode_call = decode.decode.Decode(
                worker_pb2.DecodeRequest(
                    request=request,
                    incarnation=decode.incarnation,
                    source=source,
                    steps=decode.steps.stream_id if self._inbox is not None else "",
                    step_number=self._step_number,
                ),
                metadata=self._metadata,
            )

    async def _first_token(self, prefill: Worker) -> TokenBatch:
        """P's token, unless D fails first."""
        first = asyncio.ensure_future(self._prefilled(prefill))
        waiting: set[asyncio.Future] = {first}
        if self._decode_call is not None:
            self._decode_read = asyncio.ensure_future(self._read_decode())
            waiting.add(self._decode_read)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not first.done() and self._decode_read is not None and _failed(self._decode_read):
                await asyncio.wait({first}, timeout=_CAUSE_WAIT_S)
                if not first.done():
                    await self._decode_read  # raises D's own error
            return await first
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})

    async def _prefilled(self, prefill: Worker) -> TokenBatch:
        assert self._prefill_call is not None
        while True:
            event = await self._read(self._prefill_call, prefill)
            if event.HasField("started"):
                self.prefill_started = event.started
            elif event.HasField("first_token"):
                prefill.breaker.succeeded()
                self.prefilled = event.first_token
                first = event.first_token
                tokens = [first.token] if first.HasField("token") else []
                self._due += len(tokens)
                batch = _batch(tokens, first.finish_reason, first.embedding)
                return self._first_batch(batch)
            elif event.HasField("prompt_logprobs"):
                self._take_prompt_logprobs(event.prompt_logprobs, prefill)

    async def _hand_over(self, prefill: Worker) -> None:
        """P's call lasts until D has the KV; if it fails before that, so does the attempt."""
        assert self._prefill_call is not None
        try:
            while await self._prefill_call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            await asyncio.sleep(_CAUSE_WAIT_S)
            if self.decode_started is None:
                self._end_with(self._failure(error, prefill))

    async def _decoded_by_call(self, decode: Worker) -> AsyncGenerator[TokenBatch, None]:
        """Tokens from D's own call."""
        while True:
            event = await self._next_decode_event()
            kind = event.WhichOneof("event")
            if kind == "started":
                self.decode_started = event.started
            elif kind == "prompt_logprobs":
                self._take_prompt_logprobs(event.prompt_logprobs, decode)
            else:
                batch = self._first_batch(self._take(event.tokens, decode))
                yield batch
                if batch.finish_reason is not None:
                    return

    async def _decoded_by_steps(
        self, decode: Worker, inbox: Inbox, direct: Direct[TokenBatch] | None
    ) -> AsyncGenerator[TokenBatch, None]:
        """Tokens from the worker's steps; after a hand-over, once its call has said that it has
        started."""

        def take(item: Item) -> bool:
            if direct is None or not isinstance(item, tuple) or not direct.is_open():
                return False
            direct.take(self._take(item, decode))
            return True

        if self.placement.prefill is not None:
            event = await self._next_decode_event()
            if not event.HasField("started"):
                error = UnavailableError(f"{decode.id} has not said that it has started")
                raise AttemptFailed(error, (decode,))
            self.decode_started = event.started
        self._decode_rest = asyncio.create_task(self._read_rest(decode, inbox))
        past_readers = None
        while True:
            try:
                batch = self._take(await inbox.take(past_readers), decode)
            except UnavailableError as error:  # the stream of steps has broken
                decode.breaker.failed()
                raise AttemptFailed(error, (decode,)) from None
            yield batch
            if batch.finish_reason is not None:
                return
            past_readers = take

    async def _read_rest(self, decode: Worker, inbox: Inbox) -> None:
        """D's call to its end, when its tokens come by steps."""
        call = self._decode_call
        assert call is not None
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                kind = event.WhichOneof("event")
                if kind == "started":  # not by steps, which the worker does not know any more
                    self.decode_started = event.started
                elif kind == "tokens":
                    inbox.put(event.tokens)
                elif kind == "steps_ended":
                    await asyncio.sleep(_LAST_TOKENS_S)
            decode.breaker.failed()
            early = UnavailableError(f"{decode.id} ended its answer early")
            inbox.fail(AttemptFailed(early, (decode,)))
        except grpc.aio.AioRpcError as error:
            inbox.fail(self._failure(error, decode))

    def _take(self, tokens: Item, decode: Worker) -> TokenBatch:
        """Raises AttemptFailed if they are not the next ones."""
        first_index = tokens[0] if isinstance(tokens, tuple) else tokens.first_index
        if first_index != self._due:
            raise AttemptFailed(
                UnavailableError(f"{decode.id} sent token {first_index}, not {self._due}"),
                (decode,),
            )
        decode.breaker.succeeded()
        if isinstance(tokens, tuple):
            self._due += 1
            return TokenBatch([tokens[1]], None, None)
        if tokens.HasField("started"):
            self.decode_started = tokens.started
        if self.first_step is None and tokens.HasField("first_step"):
            self.first_step = tokens.first_step
        self._due += len(tokens.tokens)
        return _batch(tokens.tokens, tokens.finish_reason, tokens.embedding)

    def _take_prompt_logprobs(self, event: worker_pb2.PromptLogprobs, worker: Worker) -> None:
        due = 1 + len(self._prompt_logprobs)
        if event.first_index != due:
            error = UnavailableError(
                f"{worker.id} sent the logprobs of prompt token {event.first_index}, not {due}"
            )
            raise AttemptFailed(error, (worker,))
        for token in event.tokens:
            _, logprobs = codec.token_from_pb(token)
            assert logprobs is not None
            self._prompt_logprobs.append(logprobs)

    def _first_batch(self, batch: TokenBatch) -> TokenBatch:
        """With the prompt's logprobs, if they were asked for and not handed out yet."""
        if self._request.sampling.prompt_logprobs is None or self._has_scored:
            return batch
        self._has_scored = True
        return replace(batch, prompt_logprobs=self._prompt_logprobs)

    async def _next_decode_event(self) -> Any:
        if self._decode_read is None:
            return await self._read_decode()
        event = await self._decode_read
        self._decode_read = None
        return event

    async def _read_decode(self) -> Any:
        assert self._decode_call is not None
        return await self._read(self._decode_call, self.placement.decode)

    async def _read(self, call: grpc.aio.UnaryStreamCall, worker: Worker) -> Any:
        try:
            event = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, worker) from None
        if event is grpc.aio.EOF:
            worker.breaker.failed()
            early = UnavailableError(f"{worker.id} ended its answer early")
            raise AttemptFailed(early, (worker,))
        return event

    def _failure(self, rpc_error: grpc.aio.AioRpcError, worker: Worker) -> AttemptFailed:
        error = error_from_rpc(rpc_error, worker.id)
        if isinstance(error, (HandoverError, StalePeerError, IncompatiblePeerError)):
            # Either side may be the cause, and a new pair has neither.
            return AttemptFailed(error, self.placement.workers)
        if isinstance(error, CancelledByPeerError):
            error = UnavailableError(f"{worker.id} aborted the request")
        if not isinstance(error, (RequestError, OverloadedError)):
            worker.breaker.failed()
        if rpc_error.code() is grpc.StatusCode.UNAVAILABLE and not _was_said(rpc_error):
            worker.suspect()
        return AttemptFailed(error, (worker,))

    def _cancel(self) -> None:
        for call in (self._prefill_call, self._decode_call):
            if call is not None:
                call.cancel()

    async def _close(self) -> None:
        """Both calls end, and what reads them."""
        self._cancel()
        tasks = (self._decode_read, self._decode_rest, self._prefill_rest)
        readers = [task for task in tasks if task is not None]
        for task in readers:
            task.cancel()
        # Their errors are of no interest any more: the attempt has ended.
        await asyncio.gather(*readers, return_exceptions=True)
        # A task that was cancelled keeps its frame, which has this attempt: without this each
        # one waits for the garbage collector, its calls along with it.
        self._decode_read = self._decode_rest = self._prefill_rest = None
        self._prefill_call = self._decode_call = None


def _batch(
    tokens: Sequence[worker_pb2.Token], reason: worker_pb2.FinishReason, embedding: bytes
) -> TokenBatch:
    finish_reason = codec.finish_from_pb(reason)
    if tokens and tokens[0].HasField("logprob"):
        ids, logprobs = zip(*map(codec.token_from_pb, tokens), strict=True)
        return TokenBatch(list(ids), list(logprobs), finish_reason)
    return TokenBatch([token.id for token in tokens], None, finish_reason, embedding=embedding)


def _failed(task: asyncio.Future) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _was_said(error: grpc.aio.AioRpcError) -> bool:
    """Whether the worker itself answered with this status, rather than the transport."""
    return any(key == "pdserve-error" for key, _ in error.trailing_metadata() or ())
