"""A controller and workers in this process that speak the real protocol and compute nothing.

Token i of an answer is a lower-case letter that depends on the prompt, i and, when the
temperature is not 0, on the seed: so a retried or resumed answer can be told from a wrong one.
"""

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from core.block_hash import block_hashes, short_hash
from core.errors import HandoverError, PdserveError, StalePeerError
from core.types import Role
from rpc import cluster_pb2, cluster_pb2_grpc, codec, worker_pb2, worker_pb2_grpc
from rpc.channel import bind, make_server
from rpc.status import translated_errors
from worker.step_stream import StepStreams

BLOCK_SIZE = 16


def answer_token(prompt: list[int], index: int, seed: int = 0) -> int:
    return ord("a") + (sum(prompt) + 7 * index + seed) % 26


def answer_text(prompt: str, num_tokens: int, seed: int = 0) -> str:
    ids = list(prompt.encode())
    return "".join(chr(answer_token(ids, index, seed)) for index in range(num_tokens))


def prompt_scores(
    request: worker_pb2.GenerationRequest,
) -> list[worker_pb2.PromptLogprobs]:
    """If asked for, in two messages: prompt token i has -i/8, and so have its followers."""
    if not request.sampling.HasField("prompt_logprobs"):
        return []
    tokens = []
    for index, token_id in enumerate(request.prompt_token_ids[1:], start=1):
        token = worker_pb2.Token(id=token_id, logprob=-index / 8)
        for rank in range(request.sampling.prompt_logprobs):
            token.top.append(
                worker_pb2.TokenLogprob(id=(token_id + rank) % 256, logprob=-(index + rank) / 8)
            )
        tokens.append(token)
    return [
        worker_pb2.PromptLogprobs(first_index=1, tokens=tokens[:2]),
        worker_pb2.PromptLogprobs(first_index=len(tokens[:2]) + 1, tokens=tokens[2:]),
    ]


def embedding_of(request: worker_pb2.GenerationRequest) -> bytes:
    """If asked for: how many tokens, their sum, and which kind of pooling."""
    if not request.sampling.pooling:
        return b""
    ids = request.prompt_token_ids
    return struct.pack("<3f", len(ids), sum(ids), request.sampling.pooling)


def says(text: str, eos: int = 256) -> Callable[[list[int], int], int]:
    """A script for `FakeWorker.script`: this text in bytes, then EOS."""
    data = text.encode()
    return lambda prompt, index: data[index] if index < len(data) else eos


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one leg, after it sent `after` tokens.

    error: the RPC ends with it. hang: nothing more comes. die: the whole server is gone.
    cut: the stream ends as if all were well. skip: a token is left out."""

    action: Literal["error", "hang", "die", "cut", "skip"]
    after: int = 0
    error: PdserveError | None = None


class FakeWorker:
    """One incarnation. `next_fault` says what goes wrong with the next call. With a `gate`, every
    token waits until somebody releases it; with a `pause`, for so many seconds."""

    def __init__(self, cluster: "FakeCluster", worker_id: str, role: Role) -> None:
        self.cluster = cluster
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
        self.address = ""
        self._pushes: set[asyncio.Queue[None]] = set()
        self._events: set[asyncio.Queue[worker_pb2.KvBlockEvents | None]] = set()
        self.steps = StepStreams()
        self.has_steps = True  # False: tokens come on each request's own call
        self._server = make_server()

    async def start(self) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Worker(self), self._server)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(_Prefill(self), self._server)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(_Decode(self), self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        await self._server.start()

    async def die(self) -> None:
        await self._server.stop(None)

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
                self.cluster.background(self.die())
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
                    await asyncio.wait_for(queue.get(), worker.status_every_s)
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
        handed = worker.cluster.hand_over(request.request_id)
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
                        await worker.cluster.taken(request.request_id)
        finally:
            worker.held.discard(request.request_id)
            if not handed.done():
                handed.set_result(False)


class _Decode(worker_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Steps(self, message, context) -> None:
        async with translated_errors(context):
            self._worker.check(message.incarnation)
            await self._worker.steps.serve(message.stream_id, context)

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
                    if not await worker.cluster.hand_over(request.request_id):
                        raise HandoverError("the prefill worker gave up")
                    worker.cluster.take(request.request_id)
                    started.num_transferred_tokens = len(request.prompt_token_ids)
                    started.kv_bytes = 1024
                    index += 1
                else:
                    started.num_cached_tokens = worker.hit(request)
                worker.measured(request)
                started.MergeFrom(worker.decode_started)
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
                    if steps is None:
                        yield worker_pb2.DecodeEvent(tokens=tokens)
                    else:
                        if reason:
                            yield worker_pb2.DecodeEvent(steps_ended=worker_pb2.StepsEnded())
                        steps.put(request.request_id, tokens)
                    index += 1
                    num_sent += 1
                    worker.num_tokens += 1


class FakeCluster:
    """The controller, and every worker that was ever started."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.states: dict[str, worker_pb2.WorkerState] = {}
        self.everyone: list[FakeWorker] = []
        self.controller = ""
        self._hand_overs: dict[str, asyncio.Future[bool]] = {}
        self._watchers: set[asyncio.Queue[None]] = set()
        self._tasks: set[asyncio.Task] = set()
        self._server = make_server()
        self._version = 0

    async def start(self) -> None:
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(_Controller(self), self._server)
        self.controller = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        await self._server.start()

    async def close(self) -> None:
        await self.stop_controller()
        await asyncio.gather(*(worker.die() for worker in self.everyone))
        await asyncio.gather(*self._tasks)

    async def stop_controller(self) -> None:
        await self._server.stop(None)

    async def add(
        self, worker_id: str, role: Role, prepare: Callable[[FakeWorker], None] | None = None
    ) -> FakeWorker:
        """Starts a worker, as a fresh incarnation if the id is known, and publishes it."""
        worker = FakeWorker(self, worker_id, role)
        if prepare is not None:
            prepare(worker)
        await worker.start()
        self.everyone.append(worker)
        self.workers[worker_id] = worker
        self.set_state(worker_id, worker_pb2.WORKER_STATE_READY)
        return worker

    def set_state(self, worker_id: str, state: worker_pb2.WorkerState) -> None:
        self.states[worker_id] = state
        self.publish()

    def remove(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.publish()

    def publish(self) -> None:
        self._version += 1
        for queue in self._watchers:
            queue.put_nowait(None)

    def view(self) -> cluster_pb2.ClusterView:
        entries = [worker.entry(self.states[worker.id]) for worker in self.workers.values()]
        return cluster_pb2.ClusterView(version=self._version, workers=entries)

    def hand_over(self, request_id: str) -> "asyncio.Future[bool]":
        if request_id not in self._hand_overs:
            self._hand_overs[request_id] = asyncio.get_running_loop().create_future()
        return self._hand_overs[request_id]

    def taken(self, request_id: str) -> "asyncio.Future[bool]":
        """Set when D has everything: the end of P's call."""
        return self.hand_over(f"taken {request_id}")

    def take(self, request_id: str) -> None:
        taken = self.taken(request_id)
        if not taken.done():
            taken.set_result(True)

    def background(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_quiet(self) -> bool:
        """No call is open anywhere and nothing is held."""
        return all(not worker.active and not worker.held for worker in self.everyone)


class _Controller(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def Watch(self, request, context) -> AsyncIterator[cluster_pb2.ClusterView]:
        queue: asyncio.Queue[None] = asyncio.Queue()
        self._cluster._watchers.add(queue)
        try:
            while True:
                yield self._cluster.view()
                try:
                    await asyncio.wait_for(queue.get(), 5)
                except TimeoutError:
                    continue
        finally:
            self._cluster._watchers.discard(queue)


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns when `condition` holds; fails the test if it does not in `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


__all__ = [
    "Fault",
    "FakeCluster",
    "FakeWorker",
    "answer_text",
    "answer_token",
    "eventually",
    "says",
]
