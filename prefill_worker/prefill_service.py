"""PrefillService: computes a prompt, announces its blocks, samples the first token."""

import grpc

from core.block_hash import token_digest
from core.errors import CancelledByPeerError, PdserveError
from core.types import GenerationRequest
from engine.types import SequenceOutput
from kv_transfer.lease import LeaseTable
from prefill_worker.announcer import Announcer
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.status import translated_errors
from rpc.trace import log_attempt
from worker.outputs import OutputStream
from worker.runtime import WorkerRuntime, now

_MAX_CHUNKS = 256  # that are reported


class PrefillService(worker_pb2_grpc.PrefillServiceServicer):
    def __init__(self, runtime: WorkerRuntime, leases: LeaseTable) -> None:
        self._runtime = runtime
        self._leases = leases

    async def Prefill(self, message: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        # Not a generator: a cancelled call must always arrive as CancelledError in here.
        async with translated_errors(context):
            self._runtime.check_callable(message.incarnation)
            request = codec.request_from_pb(message.request)
            log_attempt("prefill", request, context)
            if message.hand_over:
                await self._hand_over(request, context)
            else:
                await self._first_token_only(request, context)

    async def _first_token_only(
        self, request: GenerationRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Nobody will attach: one token, and the blocks are free again."""
        runtime, request_id = self._runtime, request.request_id
        with runtime.outputs.open(request_id) as outputs:
            try:
                matcher = await runtime.matcher(request)
                runtime.add_on_engine(
                    request_id, lambda e: e.add_prefill(request, matcher, hold=False)
                )
                await self._until_first_token(request, outputs, context, None)
            except BaseException:
                runtime.abort(request_id)
                raise

    async def _hand_over(
        self, request: GenerationRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The blocks stay pinned until the decode worker has them. This call is the attempt: when
        it ends before that, for whatever reason, so does the attempt."""
        runtime, leases, request_id = self._runtime, self._leases, request.request_id
        tokens = request.token_ids
        lease = leases.open(request_id, token_digest(tokens), len(tokens))
        announcer = Announcer(runtime, leases, request_id)
        try:
            with runtime.outputs.open(request_id) as outputs:
                matcher = await runtime.matcher(request)
                runtime.add_on_engine(request_id, lambda e: e.add_prefill(request, matcher))
                await self._until_first_token(request, outputs, context, announcer)
                await lease.ended.wait()
            if lease.error is not None:
                raise lease.error
        except PdserveError as error:
            leases.fail(request_id, error)
            raise
        except BaseException:
            leases.fail(request_id, CancelledByPeerError("the prefill was cancelled"))
            raise
        finally:
            announcer.close()

    async def _until_first_token(
        self,
        request: GenerationRequest,
        outputs: OutputStream,
        context: grpc.aio.ServicerContext,
        announcer: Announcer | None,
    ) -> None:
        """Passes on what the engine does, up to and including the first token; with max_tokens 0
        up to the end of the prompt."""
        clock = _ChunkClock()
        num_scored = 1  # nothing predicts the prompt's first token
        while True:
            output = await outputs.next()
            clock.take(output)
            if announcer is not None:
                announcer.push(output)
            if output.admitted:
                event = pb.PrefillStarted(
                    num_cached_tokens=output.num_cached_tokens, queue_seconds=output.queue_seconds
                )
                await context.write(pb.PrefillEvent(started=event))
            if output.prompt_logprobs:
                scored = codec.prompt_logprobs_to_pb(
                    request.prompt_token_ids, num_scored, output.prompt_logprobs
                )
                num_scored += len(output.prompt_logprobs)
                await context.write(pb.PrefillEvent(prompt_logprobs=scored))
            if output.token_ids or output.finish_reason is not None:
                token = None
                if output.token_ids:
                    logprobs = output.logprobs[0] if output.logprobs else None
                    token = codec.token_to_pb(output.token_ids[0], logprobs)
                first = pb.FirstToken(
                    token=token,
                    finish_reason=codec.finish_to_pb(output.finish_reason),
                    prefill_seconds=now() - clock.started,
                    chunks=clock.chunks,
                    embedding=output.embedding,
                )
                await context.write(pb.PrefillEvent(first_token=first))
                return


class _ChunkClock:
    """When each chunk of one prompt was computed, from the start of the first. The engine's own
    step times: what the outputs waited for on their way here is not in them."""

    def __init__(self) -> None:
        self.started = now()
        self.chunks: list[pb.PrefillChunk] = []
        self._num_computed = 0

    def take(self, output: SequenceOutput) -> None:
        if output.admitted:
            self._num_computed = output.num_cached_tokens
        num_tokens = output.num_computed_tokens - self._num_computed
        if num_tokens <= 0:
            return
        self._num_computed = output.num_computed_tokens
        began = now() - output.step_seconds
        if not self.chunks:
            self.started = began  # not the admission's news: it took its own time to come here
        if len(self.chunks) < _MAX_CHUNKS:
            self.chunks.append(
                pb.PrefillChunk(
                    num_tokens=num_tokens,
                    offset_seconds=max(0.0, began - self.started),
                    seconds=output.step_seconds,
                )
            )
