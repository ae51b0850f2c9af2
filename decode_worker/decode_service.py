"""DecodeService: from a hand-over, or from nothing, to a stream of tokens."""

import grpc

from core.types import GenerationRequest
from decode_worker.kv_import import KVImport
from decode_worker.peers import PeerBook
from engine.types import SequenceOutput
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.status import translated_errors
from rpc.trace import log_attempt
from worker.outputs import OutputStream
from worker.runtime import WorkerRuntime, now
from worker.step_stream import StepStream, StepStreams


class _Steps:
    """Where the tokens of one call go, if not on the call itself."""

    def __init__(self, stream: StepStream, message: pb.DecodeRequest) -> None:
        self._stream = stream
        self._request_id = message.request.request_id
        self._number = message.step_number
        self._due = 0  # index of the next token, while `next` runs

    def put(self, tokens: pb.Tokens) -> None:
        """Raises UnavailableError."""
        self._stream.put(self._request_id, tokens)

    async def next(self, outputs: OutputStream, due: int) -> tuple[SequenceOutput, int]:
        """The next output that is more than a token, as nearly none is: the tokens before it are
        sent as they come, from index `due` on. With the index of the next one. Raises as
        `OutputStream.next`."""
        self._due = due
        return await outputs.next(self._take), self._due

    def _take(self, output: SequenceOutput) -> bool:
        if (
            len(output.token_ids) != 1
            or output.logprobs is not None
            or output.finish_reason is not None
            or output.error is not None
            or output.admitted
            or output.prompt_logprobs is not None
            or not self._number
            or not self._stream.is_open
        ):
            return False
        self._stream.put_token(self._request_id, self._number, self._due, output.token_ids[0])
        self._due += 1
        return True


class DecodeService(worker_pb2_grpc.DecodeServiceServicer):
    def __init__(self, runtime: WorkerRuntime, peers: PeerBook, steps: StepStreams) -> None:
        self._runtime = runtime
        self._peers = peers
        self._steps = steps

    async def Decode(self, message: pb.DecodeRequest, context: grpc.aio.ServicerContext) -> None:
        # Not a generator: a cancelled call must always arrive as CancelledError in here.
        async with translated_errors(context):
            self._runtime.check_callable(message.incarnation)
            request = codec.request_from_pb(message.request)
            log_attempt("decode", request, context)
            steps = self._steps_of(message)
            with self._runtime.outputs.open(request.request_id) as outputs:
                if message.HasField("source"):
                    await self._after_hand_over(request, message.source, outputs, context, steps)
                else:
                    await self._from_scratch(request, outputs, context, steps)

    def _steps_of(self, message: pb.DecodeRequest) -> _Steps | None:
        stream = self._steps.get(message.steps)
        return None if stream is None else _Steps(stream, message)

    async def _after_hand_over(
        self,
        request: GenerationRequest,
        source: pb.PeerAddress,
        outputs: OutputStream,
        context: grpc.aio.ServicerContext,
        steps: _Steps | None,
    ) -> None:
        arrived = now()
        num_emitted = len(request.output_token_ids) + 1  # P's token is the first of this attempt
        # Before P is asked for anything: a grammar that is refused ends the request here.
        matcher = await self._runtime.matcher(request)
        imported = KVImport(self._runtime, self._peers, request, source, outputs, matcher)
        result = await imported.run()
        if result.finish_reason is not None:
            reason = codec.finish_to_pb(result.finish_reason)
            tokens = pb.Tokens(first_index=num_emitted, finish_reason=reason)
            await context.write(pb.DecodeEvent(tokens=tokens))
            return
        try:
            await context.write(pb.DecodeEvent(started=result.started))
            await self._stream(request, outputs, num_emitted, context, steps, arrived=arrived)
        except BaseException:
            self._runtime.abort(request.request_id)
            raise

    async def _from_scratch(
        self,
        request: GenerationRequest,
        outputs: OutputStream,
        context: grpc.aio.ServicerContext,
        steps: _Steps | None,
    ) -> None:
        try:
            matcher = await self._runtime.matcher(request)
            self._runtime.add_on_engine(request.request_id, lambda e: e.add(request, matcher))
            num_emitted = len(request.output_token_ids)
            await self._stream(request, outputs, num_emitted, context, steps, scored=request)
        except BaseException:
            self._runtime.abort(request.request_id)
            raise

    async def _stream(
        self,
        request: GenerationRequest,
        outputs: OutputStream,
        num_emitted: int,
        context: grpc.aio.ServicerContext,
        steps: _Steps | None,
        scored: GenerationRequest | None = None,
        arrived: float | None = None,
    ) -> None:
        """Tokens as they come, by `steps` if there is one; those that pile up behind a slow
        reader go as one message. By steps the admission waits for the first of them: it would take
        the time of cores that compute. `scored`: whose prompt is computed, and maybe scored, here.
        `arrived`: when the call did, if its first step is to be told."""
        is_finished, started = False, None
        num_scored = 1  # nothing predicts the prompt's first token
        while not is_finished:
            if steps is None or arrived is not None:
                output = await outputs.next()
            else:
                output, num_emitted = await steps.next(outputs, num_emitted)
            batch = [output]
            while outputs.has_more():
                batch.append(await outputs.next())
            started = _admission(batch) or started
            if started is not None and steps is None:
                await context.write(pb.DecodeEvent(started=started))
                started = None
            for output in batch:
                if output.prompt_logprobs and scored is not None:
                    message = codec.prompt_logprobs_to_pb(
                        scored.prompt_token_ids, num_scored, output.prompt_logprobs
                    )
                    num_scored += len(output.prompt_logprobs)
                    await context.write(pb.DecodeEvent(prompt_logprobs=message))
            tokens = _tokens(batch, num_emitted)
            num_emitted += len(tokens.tokens)
            is_finished = batch[-1].finish_reason is not None
            if not tokens.tokens and not is_finished:
                continue
            if arrived is not None and tokens.tokens:
                seconds = next(o.step_seconds for o in batch if o.token_ids)
                tokens.first_step.offset_seconds = max(0.0, now() - arrived - seconds)
                tokens.first_step.seconds = seconds
                arrived = None
            if steps is None:
                await context.write(pb.DecodeEvent(tokens=tokens))
                continue
            if started is not None:
                tokens.started.CopyFrom(started)
                started = None
            if is_finished:
                await context.write(pb.DecodeEvent(steps_ended=pb.StepsEnded()))
            steps.put(tokens)


def _admission(batch: list[SequenceOutput]) -> pb.DecodeStarted | None:
    for output in batch:
        if output.admitted:
            return pb.DecodeStarted(
                num_cached_tokens=output.num_cached_tokens, queue_seconds=output.queue_seconds
            )
    return None


def _tokens(batch: list[SequenceOutput], first_index: int) -> pb.Tokens:
    message = pb.Tokens(
        first_index=first_index,
        finish_reason=codec.finish_to_pb(batch[-1].finish_reason),
        embedding=batch[-1].embedding,
    )
    for output in batch:
        for i, token_id in enumerate(output.token_ids):
            logprobs = output.logprobs[i] if output.logprobs else None
            message.tokens.append(codec.token_to_pb(token_id, logprobs))
    return message
