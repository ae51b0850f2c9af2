"""How many sequences may be in this router at once, and the end of all of them on shutdown."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import OverloadedError, PdserveError, RequestError, UnavailableError
from router.processes.tally import Tally
from router.request.metrics import Metrics


class _Slot:
    def __init__(self, task: asyncio.Task) -> None:
        self.task = task
        self.error: PdserveError | None = None


class Admission:
    """Counts sequences from admission to the end of the response, those that wait for a worker
    (`router.placement.turnstile`) included. Refuses what is beyond the limit: nothing waits
    here."""

    def __init__(self, limit: int, metrics: Metrics, tally: Tally = Tally()) -> None:
        """`tally`: the limit is of all processes together."""
        self._limit = limit
        self._tally = tally
        self._metrics = metrics
        self._used = 0
        self._slots: set[_Slot] = set()
        self._is_closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def in_flight(self) -> int:
        """Sequences admitted and not ended."""
        return self._used

    @contextmanager
    def slot(self, num_sequences: int) -> Iterator[None]:
        """Holds room for `num_sequences` while the body runs, which must be in a task of its own.
        Raises OverloadedError when there is none, RequestError when there could never be."""
        if self._is_closing:
            raise self._refused(UnavailableError("the router is stopping"))
        if num_sequences > self._limit:
            raise RequestError(f"more than {self._limit} sequences in one request", param="n")
        if self._used + self._tally.elsewhere() + num_sequences > self._limit:
            raise self._refused(OverloadedError("too many requests at once, try again later"))
        task = asyncio.current_task()
        assert task is not None
        slot = _Slot(task)
        self._slots.add(slot)
        self._count(num_sequences)
        try:
            yield
        except asyncio.CancelledError:
            if slot.error is None:
                raise
            slot.task.uncancel()
            raise slot.error from None
        finally:
            self._slots.discard(slot)
            self._count(-num_sequences)

    async def close(self, grace_s: float) -> None:
        """Admits nothing more, lets what runs end within `grace_s`, then ends it with an error."""
        self._is_closing = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for slot in tuple(self._slots):
                slot.error = UnavailableError("the router is stopping")
                slot.task.cancel()
            await self._idle.wait()

    def _refused(self, error: PdserveError) -> PdserveError:
        self._metrics.count_rejection(error)
        return error

    def _count(self, change: int) -> None:
        self._used += change
        self._metrics.in_flight.set(self._used)
        self._tally.set(self._used)
        if self._used:
            self._idle.clear()
        else:
            self._idle.set()
