"""Ctrl-C, SIGTERM and a closed terminal: the first one asks, the second one does not."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

from cluster.process_tree import descendants

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals(AbstractContextManager["StopSignals"]):
    """Owns the handlers of these signals while it is entered. A SIGHUP that is ignored, as by
    nohup, stays so. An ignored SIGINT does not: a shell script's `pdserve up &` starts with one,
    and has to be able to stop what it started.

    The first signal raises KeyboardInterrupt, or once `notify` has named a loop calls back there.
    After `stopping` it does nothing: what it asks for is under way. The second signal kills every
    process below this one and ends this one at once."""

    def __init__(self) -> None:
        self._count = 0
        self._is_stopping = False
        self._is_deferring = False
        self._was_deferred = False
        self._callback: Callable[[], None] | None = None
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    def __enter__(self) -> "StopSignals":
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Again, after a library has set handlers of its own."""
        for number, before in self._before.items():
            if number != signal.SIGHUP or before is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A first signal waits for the end of the block: for libraries that lose a
        KeyboardInterrupt in their own callbacks, or are left half started by one. Processes that
        are started in the block do not hear of a closed terminal: it is for us to end them."""
        self._is_deferring = True
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._is_deferring = False
            self.install()  # the library may have set its own
        if self._was_deferred:
            raise KeyboardInterrupt

    def notify(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """From now on a first signal calls `callback` on the loop."""
        self._callback = lambda: _call_on(loop, callback)

    def stopping(self) -> None:
        self._is_stopping = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            _end_at_once()
        if self._is_stopping:
            return
        if self._is_deferring:
            self._was_deferred = True
            return
        if self._callback is None:
            raise KeyboardInterrupt
        self._callback()


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has just ended: so has what runs on it
        loop.call_soon_threadsafe(callback)


def _end_at_once() -> None:
    with contextlib.suppress(OSError):
        print("pdserve: killed", file=sys.stderr)
    for process in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    os._exit(130)
