"""The published picture of the cluster."""

import asyncio
import time
from collections.abc import AsyncIterator

from rpc import cluster_pb2 as pb

REFRESH_S = 5.0  # a view without a change is sent this often, so that a dead controller is noticed


class ViewPublisher:
    """Owns the entry of every worker. The version grows with every change, and over restarts of
    the controller too, since it starts at the clock. Watchers keep no queue: each is woken and
    reads the newest view, so a slow one skips views and costs nothing."""

    def __init__(self) -> None:
        self._entries: dict[str, pb.WorkerEntry] = {}
        self._version = time.time_ns() // 1_000_000
        self._changed = asyncio.Event()
        self._is_ending = False

    def publish(self, entry: pb.WorkerEntry) -> None:
        """Sets a worker's entry; one that equals the present one is no change."""
        if self._entries.get(entry.id) != entry:
            self._entries[entry.id] = entry
            self._wake()

    def remove(self, worker_id: str) -> None:
        if self._entries.pop(worker_id, None) is not None:
            self._wake()

    def end(self) -> None:
        """From now on the view says that the deployment ends."""
        if not self._is_ending:
            self._is_ending = True
            self._wake()

    def view(self) -> pb.ClusterView:
        return pb.ClusterView(
            version=self._version,
            workers=list(self._entries.values()),
            is_ending=self._is_ending,
        )

    async def watch(self) -> AsyncIterator[pb.ClusterView]:
        """The present view at once, then the newest after every change and every 5 s."""
        while True:
            changed = self._changed  # taken before the view: no change can fall in between
            yield self.view()
            try:
                async with asyncio.timeout(REFRESH_S):
                    await changed.wait()
            except TimeoutError:
                continue

    def _wake(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
