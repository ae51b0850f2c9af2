"""How loaded the workers are, as they say themselves, and what waits for them in the routers."""

import asyncio
import contextlib
import time
from dataclasses import dataclass

import grpc

from cluster.autoscaler import PoolLoad, RouterQueue, WorkerLoad
from cluster.view import ViewPublisher
from rpc import cluster_pb2 as pb
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as worker_pb
from rpc.channel import make_channel

_RETRY_S = 0.5
_REPORT_HOLDS_S = 5.0  # a router whose queue has something says so every second
_MAX_ROUTERS = 1024  # that are remembered


@dataclass(slots=True)
class _Watched:
    pool: str
    task: asyncio.Task[None]
    max_num_seqs: int = 1
    now: worker_pb.WorkerStatus | None = None
    before: worker_pb.WorkerStatus | None = None  # at the last `load`


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Of all routers together. `come_*`: of prompts that no worker has heard of, those that wait
    and all that were refused so far: what it grew by has arrived."""

    queue: RouterQueue = RouterQueue()
    come_prompts: int = 0
    come_tokens: int = 0


class QueueWatch:
    """Sums what the router processes say of their queues. One that has said nothing for a while
    has nothing that waits, or is gone."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, pb.QueueReport]] = {}  # by router, oldest first
        self._refused_prompts = self._refused_tokens = 0

    def note(self, report: pb.QueueReport) -> None:
        now = time.monotonic()
        # What a router had refused when it was heard first happened before anybody looked.
        _, before = self._reports.pop(report.router_id, (now, report))
        self._reports[report.router_id] = (now, report)
        if len(self._reports) > _MAX_ROUTERS:
            del self._reports[next(iter(self._reports))]
        self._refused_prompts += report.refused_prompts_total - before.refused_prompts_total
        tokens = report.refused_prompt_tokens_total - before.refused_prompt_tokens_total
        self._refused_tokens += tokens

    def look(self) -> QueueLoad:
        since = time.monotonic() - _REPORT_HOLDS_S
        fresh = [report for at, report in self._reports.values() if at >= since]
        queue = RouterQueue(
            sum(report.prompts for report in fresh),
            sum(report.prompt_tokens for report in fresh),
            max((report.oldest_seconds for report in fresh), default=0.0),
        )
        return QueueLoad(
            queue, queue.prompts + self._refused_prompts, queue.tokens + self._refused_tokens
        )


class LoadWatch:
    """Keeps the newest status of every ready worker of a view, and of the routers' queues. Owns a
    stream to each of the workers, from `start` to `stop`. A worker that does not answer counts as
    one that says nothing."""

    def __init__(self, publisher: ViewPublisher) -> None:
        self.queues = QueueWatch()
        self._publisher = publisher
        self._watched: dict[str, _Watched] = {}  # by incarnation
        self._loaded_at: dict[str, tuple[float, QueueLoad]] = {}  # by pool
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to watch, unless it does already."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="load watch")

    async def stop(self) -> None:
        tasks = [w.task for w in self._watched.values()] + ([self._task] if self._task else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watched.clear()

    def load(self, pool: str) -> PoolLoad:
        """What happened in a pool since the last call for it."""
        now, queues = time.monotonic(), self.queues.look()
        last, queues_before = self._loaded_at.get(pool, (now, queues))
        self._loaded_at[pool] = (now, queues)
        workers = []
        tokens = queues.come_tokens - queues_before.come_tokens
        prompts = queues.come_prompts - queues_before.come_prompts
        for watched in self._watched.values():
            status, before = watched.now, watched.before
            if status is None or watched.pool != pool:
                continue
            workers.append(_worker_load(status, watched.max_num_seqs))
            watched.before = status
            if before is not None:
                tokens += status.tokens_prefilled_total - before.tokens_prefilled_total
                tokens += status.waiting_prefill_tokens - before.waiting_prefill_tokens
                prompts += status.requests_total - before.requests_total
        # Prompts that were taken back while they waited can outweigh those that came.
        return PoolLoad(workers, now - last, max(tokens, 0), max(prompts, 0), queues.queue)

    async def _follow(self) -> None:
        async for view in self._publisher.watch():
            ready = {w.incarnation: w for w in view.workers if _is_ready(w)}
            for incarnation in self._watched.keys() - ready.keys():
                self._watched.pop(incarnation).task.cancel()
            for incarnation in ready.keys() - self._watched.keys():
                entry = ready[incarnation]
                task = asyncio.create_task(self._read(incarnation, entry.address))
                self._watched[incarnation] = _Watched(codec.role_from_pb(entry.role).value, task)

    async def _read(self, incarnation: str, address: str) -> None:
        """Until cancelled: a worker that is gone leaves the view."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with make_channel(address) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    info = await stub.GetInfo(worker_pb.GetInfoRequest())
                    watched = self._watched[incarnation]
                    watched.max_num_seqs = max(1, info.max_num_seqs)
                    async for status in stub.WatchStatus(worker_pb.WatchStatusRequest()):
                        watched.now = status
            await asyncio.sleep(_RETRY_S)


def _is_ready(entry: pb.WorkerEntry) -> bool:
    return entry.state == worker_pb.WORKER_STATE_READY and bool(entry.incarnation)


def _worker_load(status: worker_pb.WorkerStatus, max_num_seqs: int) -> WorkerLoad:
    blocks = status.kv_blocks
    used = blocks.running + blocks.held + blocks.awaiting
    return WorkerLoad(
        waiting_prefill_tokens=status.waiting_prefill_tokens,
        requests_running=status.requests_running,
        requests_waiting=status.requests_waiting,
        kv_use=used / blocks.total if blocks.total else 0.0,
        max_num_seqs=max_num_seqs,
        prefill_tokens_per_second=status.prefill_tokens_per_second,
        decode_step_seconds=status.decode_step_seconds,
        decode_sequence_seconds=status.decode_sequence_seconds,
    )
