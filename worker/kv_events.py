"""Tells routers which KV blocks this worker can find again."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from core.block_hash import short_hash
from core.errors import OverloadedError
from rpc import worker_pb2 as pb

# Between two messages: of 16 streams one fills a block with each step, and a message costs worker
# and router as much as the step's tokens. What a router has sent here itself it knows without.
_MIN_SECONDS = 0.1
_PER_MESSAGE = 8192  # hashes of a kind
_MAX_READERS = 64


class _Reader:
    """What one stream has not sent yet: the last word on each block, or "everything"."""

    def __init__(self) -> None:
        self.changes: dict[int, bool] = {}
        self.needs_snapshot = True
        self.woken = asyncio.Event()
        self.woken.set()


class KvEventHub:
    """Follows one engine's block pool and passes it on to any number of streams.

    - `note` runs on the engine's thread, everything else on the asyncio loop.
    - A reader's backlog never holds more changes than `limit`: past that they are thrown away and
      the reader gets a fresh snapshot, which is not longer than the pool.
    - The first change after a pause goes out at once, others `_MIN_SECONDS` after the last.
    - A block that came and went between two messages is in neither.
    """

    def __init__(self, incarnation: str, limit: int) -> None:
        self.incarnation = incarnation
        self._limit = max(limit, 1024)
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[bytes, bool]] = deque()
        self._is_scheduled = False
        self._taken_at = float("-inf")
        self._held: set[int] = set()
        self._readers: set[_Reader] = set()

    def note(self, block_hash: bytes, is_stored: bool) -> None:
        """The block can be found from now on, or no more."""
        self._inbox.append((block_hash, is_stored))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._take_in_time)

    async def messages(self) -> AsyncGenerator[pb.KvBlockEvents, None]:
        """Everything that can be found now, then the changes. Never ends by itself. Raises
        OverloadedError if there are too many readers."""
        sequence = 0
        with self._reader() as reader:
            while True:
                await reader.woken.wait()
                reader.woken.clear()
                for message in self._next(reader):
                    sequence += 1
                    message.incarnation, message.sequence = self.incarnation, sequence
                    yield message

    @contextmanager
    def _reader(self) -> Iterator[_Reader]:
        if len(self._readers) >= _MAX_READERS:
            raise OverloadedError(f"{_MAX_READERS} readers of KV events are connected already")
        reader = _Reader()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def _take_in_time(self) -> None:
        wait = self._taken_at + _MIN_SECONDS - self._loop.time()
        if wait > 0:
            self._loop.call_later(wait, self._take)
        else:
            self._take()

    def _take(self) -> None:
        # First the flag: what is noted from now on schedules another call.
        self._is_scheduled = False
        self._taken_at = self._loop.time()
        while self._inbox:
            block_hash, is_stored = self._inbox.popleft()
            name = short_hash(block_hash)
            if is_stored:
                self._held.add(name)
            else:
                self._held.discard(name)
            for reader in self._readers:
                if not reader.needs_snapshot:
                    reader.changes[name] = is_stored
                    if len(reader.changes) > self._limit:
                        reader.changes.clear()
                        reader.needs_snapshot = True
        for reader in self._readers:
            reader.woken.set()

    def _next(self, reader: _Reader) -> Iterator[pb.KvBlockEvents]:
        is_snapshot, reader.needs_snapshot = reader.needs_snapshot, False
        changes, reader.changes = reader.changes, {}
        if is_snapshot:
            stored, removed = list(self._held), []
        else:
            stored = [name for name, is_stored in changes.items() if is_stored]
            removed = [name for name, is_stored in changes.items() if not is_stored]
        longest = max(len(stored), len(removed), int(is_snapshot))
        for start in range(0, longest, _PER_MESSAGE):
            end = start + _PER_MESSAGE
            yield pb.KvBlockEvents(
                is_snapshot=is_snapshot and start == 0,
                removed=removed[start:end],
                stored=stored[start:end],
            )
