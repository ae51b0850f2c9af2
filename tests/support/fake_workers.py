"""Workers in this process that speak the real protocol and compute nothing."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from core.block_hash import block_hashes, short_hash
from core.errors import HandoverError, PdserveError, StalePeerError
from core.types import Role
from rpc import cluster_pb2, codec, worker_pb2, worker_pb2_grpc
from rpc.channel import bind, make_server
from rpc.status import translated_errors
from support.fake_answers import BLOCK_SIZE, answer_token, embedding_of, prompt_scores
from worker.step_stream import StepStreams


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one leg, after it sent `after` tokens.

    error: the RPC ends with it. hang: nothing more comes. die: the whole server is gone.
    cut: the stream ends as if all were well. skip: a token is left out."""

    action: Literal["error", "hang", "die", "cut", "skip"]
    after: int = 0
    error: PdserveError | None = None


class HandOvers:
    """Stands for KV on its way from P to D: whether P has an attempt's, and that D took it."""

    def __init__(self) -> None:
        self._given: dict[str, asyncio.Future[bool]] = {}
        self._taken: dict[str, asyncio.Future[None]] = {}

    def given(self, request_id: str) -> "asyncio.Future[bool]":
        """True when P holds the KV; False when it has given up."""
        return self._given.setdefault(request_id, asyncio.get_running_loop().create_future())

    def taken(self, request_id: str) -> "asyncio.Future[None]":
        """Done when D has everything: the end of P's call."""
        return self._taken.setdefault(request_id, asyncio.get_running_loop().create_future())

    def take(self, request_id: str) -> None:
        taken = self.taken(request_id)
        if not taken.done():
            taken.set_result(None)


class FakeWorker:
    """One incarnation. `next_fault` says what goes wrong with the next call. With a `gate`, every
    token waits until somebody releases it; with a `pause`, for so many seconds."""

    def __init__(self, hand_overs: HandOvers, worker_id: str, role: Role) -> None:
        self.kv = hand_overs
        self.id = worker_id
        self.role = role
        self.incarnation = uuid.uuid4().hex
        self.compatibility = {"dtype": "float32", "block_size": str(BLOCK_SIZE)}
        self.max_model_len = 4096
        self.num_kv_blocks = 256
        self.max_num_seqs = 64
        self.status = worker_pb2.WorkerStatus(
            state=worker_pb2.WORKER_STATE_READY,
            kv_blocks=worker_pb2.KvBlockCounts(total=256, free=256),
        )
        self.script: Callable[[list[int], int], int] | None = None
        self.next_fault: Callable[[], Fault | None] = lambda: None
        self.pause: Callable[[], float] | None = None
        self.gate: asyncio.Semaphore | None = None
        self.requests: list[worker_pb2.GenerationRequest] = []
        self.hand_overs: list[bool] = []
        self.metadata: list[dict[str, str]] = []  # of every call
        self.active = 0
        self.num_cancelled = 0
        # What it says of its times: these messages are merged into what it sends. `measure`, if
        # there is one, is asked first and may set them for the request.
        self.measure: Callable[[worker_pb2.GenerationRequest], None] | None = None
        self.prefill_started = worker_pb2.PrefillStarted()
        self.first_token = worker_pb2.FirstToken()
        self.decode_started = worker_pb2.DecodeStarted()
        self.first_step: worker_pb2.DecodeStep | None = None  # after a hand-over
        self.num_tokens = 0  # sent, of all calls
        self.held: set[str] = set()  # attempts whose KV waits here for a decode worker
        self.cached: set[bytes] = set()
        self.prefix_caching = True
        self.status_every_s = 1.0
        self.is_silent = False  # says nothing of its status any more
        self.num_block_streams = 0  # that were ever opened
        self.address = self.steps_address = ""
        self._pushes: set[asyncio.Queue[None]] = set()
        self._events: set[asyncio.Queue[worker_pb2.KvBlockEvents | None]] = set()
        self.steps = StepStreams(self.check)
        self.has_steps = True  # False: tokens come on each request's own call
        self.has_columns = True  # False: each with its request's id, as an older worker's
        self._server = make_server()
        self._deaths: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Worker(self), self._server)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(_Prefill(self), self._server)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(_Decode(self), self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        self.steps_address = await self.steps.listen("127.0.0.1")
        await self._server.start()

    async def die(self) -> None:
        await self._server.stop(None)
        await self.steps.close()

    async def close(self) -> None:
        await asyncio.gather(self.die(), *self._deaths)

    def report(self, **changes: int) -> None:
        """Changes the status and sends it."""
        for name, value in changes.items():
            setattr(self.status, name, value)
        for queue in self._pushes:
            queue.put_nowait(None)

    def entry(self, state: worker_pb2.WorkerState) -> cluster_pb2.WorkerEntry:
        return cluster_pb2.WorkerEntry(
            id=self.id,
            role=codec.role_to_pb(self.role),
            state=state,
            host="127.0.0.1",
            pid=1,
            address=self.address,
            incarnation=self.incarnation,
        )

    @contextmanager
    def counted(self, request: worker_pb2.GenerationRequest):
        self.requests.append(request)
        self.active += 1
        try:
            yield
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.active -= 1

    def token(
        self, request: worker_pb2.GenerationRequest, index: int
    ) -> tuple[worker_pb2.Token, worker_pb2.FinishReason]:
        sampling = request.sampling
        forced = [i for i, bias in sampling.logit_bias.items() if bias >= 100]
        prompt = list(request.prompt_token_ids)
        if forced:
            token_id = forced[0]
        elif self.script is not None:
            token_id = self.script(prompt, index)
        else:
            token_id = answer_token(prompt, index, sampling.seed if sampling.temperature else 0)
        token = worker_pb2.Token(id=token_id)
        if sampling.HasField("logprobs"):
            token.logprob = -0.5 - index
            for rank in range(sampling.logprobs):
                top = worker_pb2.TokenLogprob(
                    id=(token_id + rank) % 256, logprob=-0.5 - index - rank
                )
                token.top.append(top)
        if token_id in sampling.stop_token_ids and index + 1 > sampling.min_tokens:
            return token, worker_pb2.FINISH_REASON_STOP
        if index + 1 >= sampling.max_tokens:
            return token, worker_pb2.FINISH_REASON_LENGTH
        return token, worker_pb2.FINISH_REASON_UNSPECIFIED

    def measured(self, request: worker_pb2.GenerationRequest) -> None:
        if self.measure is not None:
            self.measure(request)

    async def step(self, fault: Fault | None, num_sent: int) -> bool:
        """Before each token: the gate and the fault. False: end the stream here."""
        if fault is not None and fault.after == num_sent and not await self.fail(fault):
            return False
        if self.pause is not None:
            await asyncio.sleep(self.pause())
        if self.gate is not None:
            await self.gate.acquire()
        return True

    async def fail(self, fault: Fault) -> bool:
        """Does what the fault says. False: end the stream here; True: go on."""
        if fault.action != "skip":
            if fault.action == "error":
                assert fault.error is not None
                raise fault.error
            if fault.action == "cut":
                return False
            if fault.action == "die":
                self._deaths.append(asyncio.create_task(self.die()))
            await asyncio.Event().wait()
        return True

    def hit(self, request: worker_pb2.GenerationRequest) -> int:
        """Prompt tokens found in the prefix cache, which then holds the whole prompt."""
        ids = list(request.prompt_token_ids) + list(request.output_token_ids)
        hashes = block_hashes(ids, BLOCK_SIZE, request.cache_salt)
        usable = hashes[: (len(ids) - 1) // BLOCK_SIZE]
        count = next((i for i, h in enumerate(usable) if h not in self.cached), len(usable))
        self.store(hashes)
        return count * BLOCK_SIZE

    def store(self, hashes: list[bytes]) -> None:
        new = [short_hash(value) for value in hashes if value not in self.cached]
        self.cached.update(hashes)
        self.tell(worker_pb2.KvBlockEvents(stored=new))

    def evict(self, hashes: list[bytes]) -> None:
        self.cached.difference_update(hashes)
        self.tell(worker_pb2.KvBlockEvents(removed=[short_hash(value) for value in hashes]))

    def tell(self, event: worker_pb2.KvBlockEvents | None) -> None:
        """Sends an event on every stream of KV events; None ends them."""
        for queue in self._events:
            queue.put_nowait(event)

    def check(self, incarnation: str) -> None:
        if incarnation != self.incarnation:
            raise StalePeerError("another incarnation")


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def GetInfo(self, request, context):
        worker = self._worker
        return worker_pb2.WorkerInfo(
            id=worker.id,
            role=codec.role_to_pb(worker.role),
            host="127.0.0.1",
            pid=1,
            address=worker.address,
            steps_address=worker.steps_address,
            incarnation=worker.incarnation,
            model="fake",
            compatibility=worker.compatibility,
            max_model_len=worker.max_model_len,
            block_size=BLOCK_SIZE,
            num_kv_blocks=worker.num_kv_blocks,
            kv_block_bytes=1024,
            max_num_seqs=worker.max_num_seqs,
            prefix_caching=worker.prefix_caching,
            max_batched_tokens=2048,
        )

    async def WatchKvBlocks(self, request, context) -> AsyncIterator[worker_pb2.KvBlockEvents]:
        worker = self._worker
        worker.num_block_streams += 1
        queue: asyncio.Queue[worker_pb2.KvBlockEvents | None] = asyncio.Queue()
        stored = [short_hash(value) for value in worker.cached]
        queue.put_nowait(worker_pb2.KvBlockEvents(is_snapshot=True, stored=stored))
        worker._events.add(queue)
        sequence = 0
        try:
            while (event := await queue.get()) is not None:
                sequence += 1
                message = worker_pb2.KvBlockEvents()
                message.CopyFrom(event)
                message.incarnation = worker.incarnation
                message.sequence = event.sequence or sequence
                yield message
        finally:
            worker._events.discard(queue)

    async def WatchStatus(self, request, context) -> AsyncIterator[worker_pb2.WorkerStatus]:
        worker = self._worker
        queue: asyncio.Queue[None] = asyncio.Queue()
        worker._pushes.add(queue)
        try:
            while True:
                if not worker.is_silent:
                    yield worker.status
                try:
                    async with asyncio.timeout(worker.status_every_s):
                        await queue.get()
                except TimeoutError:
                    continue
        finally:
            worker._pushes.discard(queue)


class _Prefill(worker_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Prefill(self, message, context) -> AsyncIterator[worker_pb2.PrefillEvent]:
        worker, request = self._worker, message.request
        fault = worker.next_fault()
        handed = worker.kv.given(request.request_id)
        worker.hand_overs.append(message.hand_over)
        worker.metadata.append(dict(context.invocation_metadata()))
        try:
            async with translated_errors(context):
                with worker.counted(request):
                    worker.check(message.incarnation)
                    started = worker_pb2.PrefillStarted(num_cached_tokens=worker.hit(request))
                    worker.measured(request)
                    started.MergeFrom(worker.prefill_started)
                    yield worker_pb2.PrefillEvent(started=started)
                    if not await worker.step(fault, 0):
                        return
                    for scores in prompt_scores(request):
                        yield worker_pb2.PrefillEvent(prompt_logprobs=scores)
                    if not request.sampling.max_tokens:
                        length = worker_pb2.FINISH_REASON_LENGTH
                        yield worker_pb2.PrefillEvent(
                            first_token=worker_pb2.FirstToken(
                                finish_reason=length, embedding=embedding_of(request)
                            )
                        )
                        return
                    token, reason = worker.token(request, len(request.output_token_ids))
                    if message.hand_over and not reason:
                        worker.held.add(request.request_id)
                    handed.set_result(True)
                    first = worker_pb2.FirstToken(token=token, finish_reason=reason)
                    worker.measured(request)
                    first.MergeFrom(worker.first_token)
                    yield worker_pb2.PrefillEvent(first_token=first)
                    if request.request_id in worker.held:
                        if fault is not None and fault.after == 1:
                            await worker.fail(fault)
                        await worker.kv.taken(request.request_id)
        finally:
            worker.held.discard(request.request_id)
            if not handed.done():
                handed.set_result(False)


class _Decode(worker_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Decode(self, message, context) -> AsyncIterator[worker_pb2.DecodeEvent]:
        worker, request = self._worker, message.request
        steps = worker.steps.get(message.steps) if worker.has_steps else None
        fault = worker.next_fault()
        worker.metadata.append(dict(context.invocation_metadata()))
        async with translated_errors(context):
            with worker.counted(request):
                worker.check(message.incarnation)
                started = worker_pb2.DecodeStarted()
                index = len(request.output_token_ids)
                if fault is not None and fault.after == 0 and not await worker.fail(fault):
                    return
                if message.HasField("source"):
                    if not await worker.kv.given(request.request_id):
                        raise HandoverError("the prefill worker gave up")
                    worker.kv.take(request.request_id)
                    started.num_transferred_tokens = len(request.prompt_token_ids)
                    started.kv_bytes = 1024
                    index += 1
                else:
                    started.num_cached_tokens = worker.hit(request)
                worker.measured(request)
                started.MergeFrom(worker.decode_started)
                goes_along = steps is not None and not message.HasField("source")
                if not goes_along:
                    yield worker_pb2.DecodeEvent(started=started)
                if not message.HasField("source"):
                    for scores in prompt_scores(request):
                        yield worker_pb2.DecodeEvent(prompt_logprobs=scores)
                num_sent = 0
                reason = worker_pb2.FINISH_REASON_UNSPECIFIED
                if not request.sampling.max_tokens:
                    reason = worker_pb2.FINISH_REASON_LENGTH
                    tokens = worker_pb2.Tokens(
                        first_index=index, finish_reason=reason, embedding=embedding_of(request)
                    )
                    if goes_along:
                        tokens.started.CopyFrom(started)
                    yield worker_pb2.DecodeEvent(tokens=tokens)
                while not reason:
                    if not await worker.step(fault, num_sent):
                        return
                    if fault is not None and fault.action == "skip" and fault.after == num_sent:
                        index += 1
                    token, reason = worker.token(request, index)
                    tokens = worker_pb2.Tokens(
                        first_index=index, tokens=[token], finish_reason=reason
                    )
                    if message.HasField("source") and not num_sent and worker.first_step:
                        tokens.first_step.CopyFrom(worker.first_step)
                    if goes_along and not num_sent:
                        tokens.started.CopyFrom(started)
                    if steps is None:
                        yield worker_pb2.DecodeEvent(tokens=tokens)
                    else:
                        if reason:
                            yield worker_pb2.DecodeEvent(steps_ended=worker_pb2.StepsEnded())
                        is_more = reason or tokens.HasField("first_step")
                        is_more = is_more or tokens.HasField("started")
                        is_more = is_more or token.HasField("logprob")
                        if is_more or not (worker.has_columns and message.step_number):
                            steps.put(request.request_id, tokens)
                        else:
                            number = message.step_number
                            steps.put_token(request.request_id, number, index, token.id)
                    index += 1
                    num_sent += 1
                    worker.num_tokens += 1
