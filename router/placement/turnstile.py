"""Holds requests back while the workers have enough to do, and refuses those that would be late.

Workers queue too, but first come, first served and out of reach. So a worker is sent only what it
needs to stay busy, and everybody else waits here, where it can be decided who is next.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.errors import OverloadedError
from router.placement.fair_queue import FairQueue, Ticket
from router.processes.tally import Tally

_MAX_WAIT_S = 60.0
_RECHECK_S = 0.1  # a worker may have room without saying so
_PLACED_WITHIN_S = 0.005  # unless nobody is there to place it on
_RATE_WINDOW_S = 10.0
_RATE_SAMPLES = 512
_RATE_AFTER_S = 0.25  # of a queue that was never empty, to know how fast it moves
# Predictions on arrival leave so much of the SLO to errors.
_MARGIN = 0.8
# A prompt that takes longer than the SLO by itself may still wait for this share of it.
_LEAST_SHARE = 0.25
_MAX_RETRY_S = 60.0


class Estimate(NamedTuple):
    """Seconds on the worker until the first token: behind others, and for the prompt itself. Zeros
    where nothing was measured, by which nobody is refused. `num_tokens`: of the prompt, that the
    worker has to compute."""

    queue_s: float = 0.0
    own_s: float = 0.0
    num_tokens: int = 0


class Waiting(NamedTuple):
    """What waits now, and what was refused since the beginning."""

    num_prompts: int
    num_tokens: int
    oldest_s: float  # that the first of them has waited
    num_refused: int
    num_refused_tokens: int


class Room(Protocol):
    def has_room(self) -> bool:
        """Whether a request that is placed now would begin soon."""


@dataclass(slots=True, eq=False)
class _Waiter:
    ticket: Ticket
    turn: asyncio.Future[None]
    arrived: float
    num_tokens: int
    placed: asyncio.Event = field(default_factory=asyncio.Event)


class Turnstile:
    """A bounded, fair queue in front of the workers.

    - A request that finds nobody waiting and a worker with room passes at once.
    - Others wait for their turn at most a minute; one that leaves early leaves nothing behind.
    - With an SLO for the time to first token, a request whose turn is predicted to come too late
      is refused on arrival, and one whose turn did come too late is refused then: a request that
      cannot meet the SLO must not take the time of one that can. Nothing is refused by speeds
      that were not measured.
    """

    def __init__(
        self,
        room: Room,
        limit: int,
        slo_ttft_s: float | None = None,
        on_length: Callable[[int], None] = lambda length: None,
        tally: Tally = Tally(),
    ) -> None:
        """`on_length` hears how many wait. `tally`: the limit is of all processes together."""
        self._room = room
        self._limit = limit
        self._slo_s = slo_ttft_s
        self._on_length = on_length
        self._tally = tally
        self._queue = FairQueue()
        self._waiters: dict[Ticket, _Waiter] = {}
        self._pump: asyncio.Task[None] | None = None
        self._may_have_room = asyncio.Event()
        self._rate = _Rate()
        self._num_refused = self._num_refused_tokens = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def waiting(self) -> Waiting:
        """What there is to do that no worker has heard of."""
        waiters = self._waiters.values()
        now = asyncio.get_running_loop().time()
        return Waiting(
            len(waiters),
            sum(waiter.num_tokens for waiter in waiters),
            max((now - waiter.arrived for waiter in waiters), default=0.0),
            self._num_refused,
            self._num_refused_tokens,
        )

    def wake(self) -> None:
        """A worker may have room."""
        self._may_have_room.set()

    @asynccontextmanager
    async def turn(
        self, key: str, priority: int, work: float, estimate: Callable[[], Estimate]
    ) -> AsyncIterator[float]:
        """Waits for the turn of a request of `work` tokens; yields how long it waited. `estimate`
        is of the time that follows. The body places the request; until it ends nobody else is let
        through. Raises OverloadedError."""
        if not len(self._queue) and self._room.has_room():
            yield 0.0
            return
        guess = estimate()
        self._check_arrival(key, priority, guess)
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        ticket = self._queue.push(key, priority, work)
        waiter = _Waiter(ticket, loop.create_future(), arrived, guess.num_tokens)
        self._waiters[waiter.ticket] = waiter
        self._changed()
        try:
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    await waiter.turn
            except TimeoutError:
                self._count_refused(guess)
                raise OverloadedError(
                    f"no worker had room for {_MAX_WAIT_S:.0f} s", retry_after_s=_MAX_WAIT_S
                ) from None
            yield loop.time() - arrived
        finally:
            waiter.placed.set()
            if self._waiters.pop(waiter.ticket, None) is not None:
                self._queue.remove(waiter.ticket)
                self._changed()

    def check(self, waited_s: float, estimate: Estimate) -> None:
        """Raises OverloadedError if the first token of a request that has waited so long, or is
        going to, comes too late."""
        if self._slo_s is None:
            return
        wait_s, own_s = waited_s + estimate.queue_s, estimate.own_s
        late_s = wait_s - max(self._slo_s - own_s, _LEAST_SHARE * self._slo_s)
        if late_s > 0:
            self._count_refused(estimate)
            raise OverloadedError(
                f"the first token would take about {wait_s + own_s:.1f} s, more than the "
                f"{self._slo_s:g} s that this service promises: try again later",
                retry_after_s=min(max(late_s, 1.0), _MAX_RETRY_S),
            )

    def _check_arrival(self, key: str, priority: int, estimate: Estimate) -> None:
        per_s = self._rate.per_s(asyncio.get_running_loop().time())
        wait_s = self._queue.work_before(key, priority) / per_s if per_s else 0.0
        if len(self._queue) + self._tally.elsewhere() >= self._limit:
            retry_s = min(max(wait_s, 1.0), _MAX_RETRY_S)
            self._count_refused(estimate)
            raise OverloadedError(
                f"{self._limit} requests are waiting already, try again later",
                retry_after_s=retry_s,
            )
        self.check(wait_s / _MARGIN, estimate)

    def _count_refused(self, estimate: Estimate) -> None:
        self._num_refused += 1
        self._num_refused_tokens += estimate.num_tokens

    def _tell_length(self) -> None:
        self._on_length(len(self._queue))
        self._tally.set(len(self._queue))

    def _changed(self) -> None:
        self._tell_length()
        if len(self._queue) and self._pump is None:
            self._rate.begin(asyncio.get_running_loop().time())
            self._pump = asyncio.create_task(self._let_through(), name="turnstile")

    async def close(self) -> None:
        """Nobody is let through any more."""
        if (pump := self._pump) is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _let_through(self) -> None:
        """One at a time: the next one must see what the last one took."""
        try:
            while len(self._queue):
                self._may_have_room.clear()
                if self._room.has_room():
                    await self._let_one_through()
                else:
                    await _wait(self._may_have_room, _RECHECK_S)
        finally:
            self._pump = None

    async def _let_one_through(self) -> None:
        ticket = self._queue.pop()
        waiter = self._waiters.pop(ticket)
        self._tell_length()
        if waiter.turn.done():  # it was cancelled a moment ago
            return
        waiter.turn.set_result(None)
        await _wait(waiter.placed, _PLACED_WITHIN_S)
        self._rate.note(asyncio.get_running_loop().time(), ticket.work)


class _Rate:
    """Work a second that a queue lets through, over the last seconds in which it was not empty."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RATE_SAMPLES)
        self._begin = 0.0

    def begin(self, now: float) -> None:
        """The queue was empty until now."""
        self._samples.clear()
        self._begin = now

    def note(self, now: float, work: float) -> None:
        self._samples.append((now, work))

    def per_s(self, now: float) -> float | None:
        """None: not known yet."""
        samples = self._samples
        while samples and samples[0][0] < now - _RATE_WINDOW_S:
            self._begin = samples.popleft()[0]
        if samples.maxlen == len(samples):
            self._begin = samples[0][0]
        seconds = now - self._begin
        if seconds < _RATE_AFTER_S or not samples:
            return None
        return sum(work for _, work in samples) / seconds


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
