"""Two workers on one machine, which take cores and memory bandwidth from each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.event_loop import EventLoop


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long a step takes while a worker of the other pool on the same host has a
    step in flight."""

    prefill: float = 1.0
    decode: float = 1.0


class Pace:
    """One worker's share of its host: how long its work takes now, and its work in flight.

    `on_change` hears when that changes. What is begun with `begin` keeps its share of work done
    and is stretched or shrunk from there on. A worker without a neighbour has factor 1 for good.
    """

    def __init__(self, loop: EventLoop, slowdown: float = 1.0) -> None:
        self.factor = 1.0
        self.on_change: Callable[[], None] | None = None
        self._loop, self._slowdown = loop, slowdown
        self._neighbour: Pace | None = None
        self._is_busy = False
        self._id = 0  # of the event that counts
        self._work: tuple[Callable[[Any], None], Any] | None = None
        self._left_s = self._since = 0.0

    def share_with(self, neighbour: "Pace") -> None:
        """From now on each slows the other down."""
        self._neighbour, neighbour._neighbour = neighbour, self

    def set_busy(self, is_busy: bool) -> None:
        if self._neighbour is None or is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        self._neighbour._change(self._neighbour._slowdown if is_busy else 1.0)

    def begin(self, seconds: float, callback: Callable[[Any], None], argument: Any) -> None:
        """Calls `callback(argument)` when work of so many undisturbed seconds is done."""
        self._work = callback, argument
        self._left_s, self._since = seconds, self._loop.now
        self._schedule()

    def _change(self, factor: float) -> None:
        if self._work is not None:
            self._left_s -= (self._loop.now - self._since) / self.factor
            self._since = self._loop.now
        self.factor = factor
        if self._work is not None:
            self._schedule()
        if self.on_change is not None:
            self.on_change()

    def _schedule(self) -> None:
        self._id += 1
        self._loop.at(self._loop.now + max(self._left_s, 0.0) * self.factor, self._end, self._id)

    def _end(self, event_id: int) -> None:
        if event_id == self._id and self._work is not None:
            callback, argument = self._work
            self._work = None
            callback(argument)
