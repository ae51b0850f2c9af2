"""Whose turn it is: a queue that is fair to keys by the work that they ask for."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

# Clocks of keys that have nothing queued are kept up to here while they say something.
_MAX_IDLE_KEYS = 1024


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that waits. `work` is its cost, in tokens."""

    key: str
    priority: int  # lower goes first, among the requests of its key
    work: float
    arrival: int

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.arrival


@dataclass(slots=True)
class _Lane:
    """The requests of one key, first to last, and the key's clock: the work it was given."""

    clock: float
    tickets: list[Ticket] = field(default_factory=list)
    work: float = 0.0


class FairQueue:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996) over keys.

    Each key has a clock that goes on by the work of what it was given. The key that is furthest
    behind goes next; one that had nothing to do starts at the present. So a key that asks for
    more than its share waits behind its own requests, never in front of another key's. Within a
    key: by priority, then by arrival. Not bounded: whoever pushes looks at `len` first.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._idle: dict[str, float] = {}  # clocks that are ahead of the present
        self._now = 0.0
        self._num = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return self._num

    def push(self, key: str, priority: int, work: float) -> Ticket:
        self._num_arrived += 1
        ticket = Ticket(key, priority, max(work, 1.0), self._num_arrived)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(self._start(key))
            self._idle.pop(key, None)
        insort(lane.tickets, ticket, key=_order)
        lane.work += ticket.work
        self._num += 1
        return ticket

    def pop(self) -> Ticket:
        """Whose turn it is. Raises IndexError if nobody waits."""
        if not self._lanes:
            raise IndexError("the queue is empty")
        lane = min(self._lanes.values(), key=lambda lane: (lane.clock, lane.tickets[0].arrival))
        ticket = lane.tickets[0]
        self._now = lane.clock
        lane.clock += ticket.work
        self._take(lane, 0)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Of one who does not want to wait any more. Does nothing if it is not waiting."""
        lane = self._lanes.get(ticket.key)
        if lane is None:
            return
        index = bisect_left(lane.tickets, ticket.order, key=_order)
        if index < len(lane.tickets) and lane.tickets[index] is ticket:
            self._take(lane, index)

    def work_before(self, key: str, priority: int) -> float:
        """Work that is given out before a request that would be pushed now."""
        own = self._lanes.get(key)
        clock = self._start(key) if own is None else own.clock
        before = 0.0
        if own is not None:
            before = sum(t.work for t in own.tickets if t.priority <= priority)
        mine = clock + before
        for other, lane in self._lanes.items():
            if other != key:
                before += min(max(mine - lane.clock, 0.0), lane.work)
        return before

    def _start(self, key: str) -> float:
        return max(self._now, self._idle.get(key, 0.0))

    def _take(self, lane: _Lane, index: int) -> None:
        ticket = lane.tickets.pop(index)
        lane.work -= ticket.work
        self._num -= 1
        if lane.tickets:
            return
        del self._lanes[ticket.key]
        self._idle[ticket.key] = lane.clock
        if len(self._idle) > _MAX_IDLE_KEYS:
            ahead = sorted(self._idle.items(), key=lambda item: -item[1])[: _MAX_IDLE_KEYS // 2]
            self._idle = {name: clock for name, clock in ahead if clock > self._now}


def _order(ticket: Ticket) -> tuple[int, int]:
    return ticket.order
