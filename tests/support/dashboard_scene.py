"""A router with 2P2D of fake workers under load: for looking at its dashboard.

Nothing is computed. What workers say of their times follows from the length of the prompt and from
who waits before it, at speeds of a small model on a good processor.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

from core.errors import UnavailableError
from rpc import worker_pb2
from support.fake_answers import BLOCK_SIZE, says
from support.fake_workers import FakeWorker, Fault
from support.router import Running, running

_CHUNK = 512  # tokens
_PREFILL_RATE = 2000.0  # tokens a second
_KV_BYTES = 23_040  # of one token
_KV_RATE = 1.4e9  # bytes a second
_STEP_S = 0.018
_NUM_BLOCKS = 1024
ANSWER = (
    "The sky is blue because the air scatters short waves of light far more than long ones. "
    "Sunlight holds every colour; on its way down the blue part is sent in all directions, so it "
    "reaches us from everywhere, while red and yellow come almost straight from the sun. At dusk "
    "the way through the air is longer, most of the blue is gone, and the rest glows red."
)


@dataclass(slots=True)
class Plan:
    """When one attempt's prompt is computed and moved. Seconds from its arrival."""

    num_tokens: int
    wait: float
    chunks: list[tuple[int, float, float]] = field(default_factory=list)  # tokens, start, seconds

    @property
    def seconds(self) -> float:
        return self.num_tokens / _PREFILL_RATE

    @classmethod
    def make(cls, num_tokens: int, wait: float) -> "Plan":
        plan = cls(num_tokens, wait)
        for start in range(0, num_tokens, _CHUNK):
            count = min(_CHUNK, num_tokens - start)
            plan.chunks.append((count, start / _PREFILL_RATE, count / _PREFILL_RATE))
        return plan


class Scene:
    """Plans of all attempts, and until when each prefill worker is busy with them."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.busy_until: dict[str, float] = {}

    def prepare(self, worker: FakeWorker) -> None:
        dice = random.Random(worker.id)
        worker.script = says(ANSWER)
        worker.num_kv_blocks = 100_000  # its cache of hashes is never evicted
        worker.max_num_seqs = 8 if worker.id.startswith("prefill") else 16
        if worker.id.startswith("prefill"):
            worker.measure = lambda request: self._prefilling(worker, request)
            # Until all that it has taken in is done: the latest request's own end.
            worker.pause = lambda: max(0.0, self.busy_until[worker.id] - monotonic())
        else:
            worker.measure = lambda request: self._decoding(worker, request)
            worker.pause = lambda: dice.uniform(0.8, 1.4) * _STEP_S

    def _prefilling(self, worker: FakeWorker, request: worker_pb2.GenerationRequest) -> None:
        plan = self.plans.get(request.request_id)
        if plan is None:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            begins = max(monotonic(), self.busy_until.get(worker.id, 0.0))
            plan = Plan.make(num_tokens, begins - monotonic())
            self.plans[request.request_id] = plan
            self.busy_until[worker.id] = begins + plan.seconds
        worker.prefill_started.queue_seconds = plan.wait
        worker.first_token.Clear()
        worker.first_token.prefill_seconds = plan.seconds
        for num_tokens, start, seconds in plan.chunks:
            worker.first_token.chunks.add(
                num_tokens=num_tokens, offset_seconds=start, seconds=seconds
            )

    def _decoding(self, worker: FakeWorker, request: worker_pb2.GenerationRequest) -> None:
        plan = self.plans[request.request_id]
        started = worker.decode_started
        started.Clear()
        started.kv_bytes = plan.num_tokens * _KV_BYTES
        started.queue_offset_seconds = plan.wait
        started.queue_seconds = 0.004
        for num_tokens, start, seconds in plan.chunks:
            num_bytes = num_tokens * _KV_BYTES
            at = plan.wait + start + seconds + 0.001
            started.pulls.add(bytes=num_bytes, offset_seconds=at, seconds=num_bytes / _KV_RATE)
            started.kv_transfer_seconds += num_bytes / _KV_RATE
        last = started.pulls[-1]
        started.kv_tail_seconds = last.seconds + 0.003
        started.hand_over_seconds = last.offset_seconds + last.seconds + 0.002
        worker.first_step = worker_pb2.DecodeStep(
            offset_seconds=started.hand_over_seconds + 0.002, seconds=_STEP_S
        )

    async def report(self, workers: list[FakeWorker]) -> None:
        """Statuses as a worker with so much to do would send them."""
        seen = dict.fromkeys((worker.id for worker in workers), 0)
        cached = dict.fromkeys(seen, 60)
        while True:
            await asyncio.sleep(0.1)
            for worker in workers:
                fresh = worker.requests[seen[worker.id] :]
                seen[worker.id] += len(fresh)
                num_tokens = sum(len(request.prompt_token_ids) for request in fresh)
                cached[worker.id] = min(400, cached[worker.id] + num_tokens // BLOCK_SIZE)
                if worker.id.startswith("prefill"):
                    self._report_prefill(worker, num_tokens, cached[worker.id])
                else:
                    self._report_decode(worker, num_tokens, cached[worker.id])

    def _report_prefill(self, worker: FakeWorker, num_tokens: int, cached: int) -> None:
        left = max(0.0, self.busy_until.get(worker.id, 0.0) - monotonic()) * _PREFILL_RATE
        waiting = int(left // 1000)
        held = min(300, 70 * len(worker.held))
        running_blocks = min(200, int(left / BLOCK_SIZE))
        _blocks(worker, running=running_blocks, held=held, cached=cached)
        worker.status.tokens_prefilled_total += num_tokens
        worker.report(
            requests_running=int(left > 0),
            requests_waiting=waiting,
            waiting_prefill_tokens=int(left),
        )

    def _report_decode(self, worker: FakeWorker, num_tokens: int, cached: int) -> None:
        mine = min(520, 74 * worker.active)
        _blocks(worker, running=mine * 4 // 5, awaiting=mine // 5, cached=cached)
        worker.status.kv_bytes_received_total += num_tokens * _KV_BYTES
        worker.report(
            requests_running=min(worker.active, 16), tokens_decoded_total=worker.num_tokens
        )


def _blocks(worker: FakeWorker, **counts: int) -> None:
    used = sum(counts.values())
    worker.status.kv_blocks.CopyFrom(
        worker_pb2.KvBlockCounts(total=_NUM_BLOCKS, free=_NUM_BLOCKS - used, **counts)
    )
    worker.status.transport = "nixl (cma)"


async def _client(it: Running, number: int) -> None:
    dice = random.Random(number)
    while True:
        prompt = f"{number}.{dice.random()} " + "p" * dice.randint(300, 1500)
        await it.complete(prompt, max_tokens=dice.randint(40, 200))
        await asyncio.sleep(dice.uniform(0.1, 1.0))


@asynccontextmanager
async def scene(num_clients: int = 0) -> AsyncIterator[Running]:
    """2P2D with that many clients that ask again and again."""
    scenery = Scene()
    async with running(prefills=2, decodes=2, prepare=scenery.prepare) as it:
        tasks = [asyncio.create_task(scenery.report(it.cluster.everyone))]
        tasks += [asyncio.create_task(_client(it, number)) for number in range(num_clients)]
        try:
            yield it
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


def break_twice(it: Running) -> None:
    """The next request loses its prefill worker before the first token, then a decode worker."""
    error = UnavailableError("connection reset by peer")
    prefill, decode = iter([Fault("error", 0, error)]), iter([None, Fault("error", 24, error)])
    for worker in it.cluster.workers.values():
        faults = prefill if worker.id.startswith("prefill") else decode
        worker.next_fault = lambda faults=faults: next(faults, None)
