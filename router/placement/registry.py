"""Which workers there are: follows the controller's view, and each worker's own status."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from core.errors import UnavailableError
from core.kv_compatibility import differences
from core.types import Role
from router.placement.prefix_index import PrefixIndex
from router.placement.worker import Compatibility, Worker
from rpc import cluster_pb2, cluster_pb2_grpc, worker_pb2
from rpc.channel import make_channel

logger = logging.getLogger(__name__)

_VIEW_SILENCE_S = 20.0  # views come every 5 s
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Registry:
    """The live set of workers, at most one incarnation of each id.

    Loss of the controller changes nothing here: the last view stands until a new one arrives.
    Owns the controller's channel, every Worker, and the index of their KV blocks.
    """

    def __init__(self, controller: str, roles: Sequence[Role]) -> None:
        self.roles = tuple(roles)  # that this router places requests on
        self.entries: dict[str, cluster_pb2.WorkerEntry] = {}
        self.workers: dict[str, Worker] = {}
        self.prefixes = PrefixIndex()
        # Called whenever a worker may have room for another request.
        self.on_room: Callable[[], None] = lambda: None
        self._retired: set[Worker] = set()
        self.controller = controller  # where it is, as far as is known
        self.hears_controller = False
        self._first_controller = controller
        self._failures = 0  # to hear of it, in a row
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._mismatches: set[tuple[str, str]] = set()
        self._bridged: set[tuple[Compatibility, Compatibility]] = set()  # differ, and can pair

    def start(self) -> None:
        self._follower = asyncio.create_task(self._follow(), name="follow the controller")

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with suppress(asyncio.CancelledError):
                await self._follower
        workers = [*self.workers.values(), *self._retired]
        await asyncio.gather(*(worker.close("the router is stopping") for worker in workers))
        await asyncio.gather(*self._tasks)

    def ready(self, role: Role) -> list[Worker]:
        return [w for w in self.workers.values() if w.role == role and w.is_ready]

    def can_serve(self) -> bool:
        """At least one worker of each role, and a pair that can share KV."""
        if len(self.roles) == 1:
            return bool(self.ready(self.roles[0]))
        prefills, decodes = (self.ready(role) for role in self.roles)
        return any(self.can_pair(p, d) for p in prefills for d in decodes)

    def can_pair(self, prefill: Worker, decode: Worker) -> bool:
        """Whether KV may pass between two ready workers. Says why not, once for each pair."""
        both = (prefill.compatibility, decode.compatibility)
        if both[0] == both[1] or both in self._bridged:
            return True
        assert prefill.info is not None and decode.info is not None
        ours, theirs = prefill.info.compatibility, decode.info.compatibility
        if not (names := differences(ours, theirs)):
            if len(self._bridged) > 1024:
                self._bridged.clear()
            self._bridged.add(both)
            return True
        key = (prefill.incarnation, decode.incarnation)
        if key not in self._mismatches:
            if len(self._mismatches) > 4096:
                self._mismatches.clear()
            self._mismatches.add(key)
            what = ", ".join(
                f"{name} ({ours.get(name, 'unset')} and {theirs.get(name, 'unset')})"
                for name in names
            )
            logger.warning("%s and %s are never paired: %s differ", prefill.id, decode.id, what)
        return False

    def max_model_len(self) -> int:
        """Tokens that every ready worker can hold for one request. Raises UnavailableError."""
        lengths = [
            worker.info.max_model_len
            for role in self.roles
            for worker in self.ready(role)
            if worker.info is not None
        ]
        if not lengths:
            raise UnavailableError("no worker is ready")
        return min(lengths)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns after the next change of what can be placed, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_room()
        for worker in [w for w in self._retired if not w.reachable and not w.num_passengers]:
            self._drop(worker, "it left the cluster")

    def apply(self, view: cluster_pb2.ClusterView) -> None:
        """Makes the worker set what `view` says."""
        entries = {entry.id: entry for entry in view.workers}
        for worker_id, worker in list(self.workers.items()):
            entry = entries.get(worker_id)
            if entry is None:
                # Scaled away, or a controller that has not found it again yet: it may finish.
                del self.workers[worker_id]
                worker.retire()
                self._retired.add(worker)
            elif entry.state == worker_pb2.WORKER_STATE_DEAD:
                self._drop(self.workers.pop(worker_id), entry.detail or "it died")
            elif entry.incarnation != worker.incarnation:
                self._drop(self.workers.pop(worker_id), "it was replaced")
            else:
                worker.entry = entry
        for entry in entries.values():
            if entry.incarnation and entry.address and entry.id not in self.workers:
                if entry.state == worker_pb2.WORKER_STATE_DEAD:
                    continue
                self._add(entry)
        self.entries = entries
        self.notify()

    def _add(self, entry: cluster_pb2.WorkerEntry) -> None:
        for worker in self._retired:
            if worker.incarnation == entry.incarnation:
                # The controller has found it again.
                self._retired.discard(worker)
                worker.entry, worker.retired = entry, False
                self.workers[entry.id] = worker
                return
        logger.info("%s joins at %s", entry.id, entry.address)
        self.workers[entry.id] = Worker(entry, self.prefixes, self.notify, lambda: self.on_room())

    def _drop(self, worker: Worker, reason: str) -> None:
        logger.info("%s (%s) is gone: %s", worker.id, worker.incarnation, reason)
        self._retired.discard(worker)
        worker.retire()
        task = asyncio.create_task(worker.close(reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self) -> None:
        router_id = uuid.uuid4().hex
        while True:
            await self._follow_one(router_id)

    def _next_controller(self) -> str:
        """Another place in turn: where it was at first, or where workers say that it is."""
        statuses = [worker.status for worker in self.workers.values()]
        told = {status.controller for status in statuses if status is not None}
        places = sorted({self._first_controller, *told} - {""})
        later = [place for place in places if place > self.controller]
        return (later or places)[0]

    async def _follow_one(self, router_id: str) -> None:
        """Applies the views of the controller at its present address, until it is lost and may be
        at another one."""
        async with make_channel(self.controller) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            while True:
                views = stub.Watch(cluster_pb2.WatchRequest(router_id=router_id))
                try:
                    while True:
                        async with asyncio.timeout(_VIEW_SILENCE_S):
                            view = await views.read()
                        if view is grpc.aio.EOF:
                            break
                        if self._failures:
                            logger.info("the controller is at %s", self.controller)
                        self._failures, self.hears_controller = 0, True
                        self.apply(view)
                    reason = "it ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                except TimeoutError:
                    reason = "no word from it"
                finally:
                    views.cancel()
                    self.hears_controller = False
                if self._failures == 0:
                    logger.warning("the controller is lost (%s); the last view stands", reason)
                await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])
                self._failures += 1
                if (place := self._next_controller()) != self.controller:
                    self.controller = place
                    return
