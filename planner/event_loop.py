"""Simulated time: a heap of callbacks."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventLoop:
    """Runs callbacks in the order of their time; those of one time in the order they were added,
    so that a run depends on its inputs alone. Time never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_added = 0

    def at(self, time: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        """Calls `callback(argument)` at `time`, or now if that is past."""
        self._num_added += 1
        heappush(self._heap, (max(time, self.now), self._num_added, callback, argument))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, callback, argument = heappop(heap)
            self.num_events += 1
            callback(argument)
