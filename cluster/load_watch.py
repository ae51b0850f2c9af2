"""How loaded the workers are, as they say themselves."""

import asyncio
import contextlib
import time
from dataclasses import dataclass

import grpc

from cluster.autoscaler import PoolLoad, WorkerLoad
from cluster.view import ViewPublisher
from rpc import cluster_pb2 as pb
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as worker_pb
from rpc.channel import make_channel

_RETRY_S = 0.5


@dataclass(slots=True)
class _Watched:
    pool: str
    task: asyncio.Task[None]
    max_num_seqs: int = 1
    now: worker_pb.WorkerStatus | None = None
    before: worker_pb.WorkerStatus | None = None  # at the last `load`


class LoadWatch:
    """Keeps the newest status of every ready worker of a view. Owns a stream to each of them, from
    `start` to `stop`. A worker that does not answer counts as one that says nothing."""

    def __init__(self, publisher: ViewPublisher) -> None:
        self._publisher = publisher
        self._watched: dict[str, _Watched] = {}  # by incarnation
        self._loaded_at: dict[str, float] = {}  # by pool
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
        now = time.monotonic()
        seconds = now - self._loaded_at.get(pool, now)
        self._loaded_at[pool] = now
        workers, tokens, prompts = [], 0, 0
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
        return PoolLoad(workers, seconds, max(tokens, 0), prompts)

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
