"""Brings the engine's step outputs to the coroutines that wait for them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.errors import EngineError, PdserveError
from engine.types import SequenceOutput

# Takes an output at once, on the event loop. False: it has done nothing, the reader has to.
Direct = Callable[[SequenceOutput], bool]


class OutputStream:
    """The outputs of one request, in order. Bounded by the request's own length. One reader."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[SequenceOutput | PdserveError] = asyncio.Queue()
        self._direct: Direct | None = None  # while the reader waits

    async def next(self, direct: Direct | None = None) -> SequenceOutput:
        """The next output that `direct` does not take: those that come while this waits are
        offered to it, so that not every one has to wake the reader. Raises EngineError if the
        engine gave this request up."""
        if self._queue.empty():
            self._direct = direct
        try:
            item = await self._queue.get()
        finally:
            self._direct = None
        if isinstance(item, PdserveError):
            raise item
        if item.error is not None:
            raise EngineError(item.error)
        return item

    def has_more(self) -> bool:
        return not self._queue.empty()

    def put(self, item: SequenceOutput | PdserveError) -> None:
        if self._direct is not None:
            if isinstance(item, SequenceOutput) and self._direct(item):
                return
            self._direct = None  # what follows has to wait behind this one
        self._queue.put_nowait(item)


class OutputHub:
    """All open output streams of one worker. Outputs of unknown requests are dropped: their
    reader has gone and its abort is on the way."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}
        self.num_opened = 0

    @contextmanager
    def open(self, request_id: str) -> Iterator[OutputStream]:
        stream = self._streams[request_id] = OutputStream()
        self.num_opened += 1
        try:
            yield stream
        finally:
            self._streams.pop(request_id, None)

    def dispatch(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if stream := self._streams.get(output.request_id):
                stream.put(output)

    def fail(self, request_id: str, error: PdserveError) -> None:
        if stream := self._streams.get(request_id):
            stream.put(error)

    def fail_all(self, error: PdserveError) -> None:
        for stream in self._streams.values():
            stream.put(error)

    def __len__(self) -> int:
        return len(self._streams)
