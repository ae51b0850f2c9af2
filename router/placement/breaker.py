"""A circuit breaker for one worker."""

from collections.abc import Callable
from time import monotonic

_THRESHOLD = 3
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


class Breaker:
    """Closed while requests succeed. After three failures in a row it opens; after a pause, which
    doubles with each failed probe, it lets a single request through (half open) and closes with
    that one's success."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def allows(self) -> bool:
        """Whether a request may be sent now. Pure: `sent` is what takes the probe."""
        return self._opened_at is None or self._clock() - self._opened_at >= self._pause_s

    def sent(self) -> None:
        """A request goes out. When half open it is the probe: the next one waits a pause more."""
        if self._opened_at is not None:
            self._opened_at = self._clock()

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_at = None
        self._pause_s = _FIRST_PAUSE_S

    def failed(self) -> None:
        self._failures += 1
        if self._opened_at is not None:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            self._opened_at = self._clock()
        elif self._failures >= _THRESHOLD:
            self._opened_at = self._clock()
