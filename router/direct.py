"""A short way for what needs no reader to wake up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Direct(Generic[T]):
    """Where one stream's next item may go by a call, past the generators that wait for it: a task
    that wakes up and half a dozen generators are most of what a token costs.

    A layer that is a generator offers one to the layer below, and does in `take` what it does
    between an item and its yield. `take` is called on the event loop, in order, only while the
    generators wait for the next item, and only if `is_open`: else, as for an item that ends
    something, the generators get it. So both ways may alternate, and nothing overtakes."""

    is_open: Callable[[], bool]
    take: Callable[[T], None]

    def after(self, change: Callable[[S], T]) -> "Direct[S]":
        """For the layer below, whose items `change` makes into these."""
        take = self.take
        return Direct(self.is_open, lambda item: take(change(item)))
