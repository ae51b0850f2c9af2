"""The engine's thread: everything that touches an engine runs there."""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from core.errors import EngineError
from engine.engine import Engine
from engine.types import SequenceOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Call = tuple[Future[Any], Callable[[Engine], Any]]

# Longest sleep of a loop that has work but could not go on: whatever unblocks it is a call, so
# that this only bounds the harm of a bug.
_RETRY_SECONDS = 1.0


class EngineLoop:
    """Owns the thread, and with it the engine from `start` to `stop`.

    - Calls run in order of arrival, between steps. One that was made before `stop` returned
      gets a result or an exception, always.
    - `on_outputs` gets outputs in the order of steps, never none, before any later call runs.
      While steps follow each other it gets those of a step when the model begins with the next
      one, and with them what that one has admitted for a peer: from there on this thread holds
      no lock of the interpreter, and whoever handles the outputs does not hold it up. `on_crash`
      is the last thing called, at most once. Both run on this thread and must not block.
    - The thread sleeps while there is no work, and while a step changes nothing: only a call
      can change that.
    - While another process of the host reads a prompt, steps that only decode begin `pace` seconds
      after each other or later, and leave the cores to it in between; 0: as soon as they can. So
      does the first step of a sequence whose KV came from a peer.
    - With PDSERVE_DEBUG=1 the engine's books are checked whenever it is idle; an error there is
      a crash.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[SequenceOutput]], None],
        on_crash: Callable[[BaseException], None],
        pace: float = 0.0,
        prompt_is_read: Callable[[], bool] = lambda: False,
    ) -> None:
        """`prompt_is_read`: by another process."""
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # None wakes only
        self._lock = threading.Lock()  # orders `call` against the end of the inbox
        self._is_closed = False
        self._undelivered: list[SequenceOutput] = []
        self._checks_when_idle = os.environ.get("PDSERVE_DEBUG") == "1"
        self._is_stopping = threading.Event()
        self._progress_at: float | None = None  # None: idle
        self._pace = pace
        self._prompt_is_read = prompt_is_read
        self._step_began_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step that it is in, fails calls that have not run and waits
        at most `timeout` seconds. False: the thread is still in its step."""
        self._is_stopping.set()
        self._close()
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function` on the engine's thread. A future that is cancelled before its turn
        does not run: shield calls that must (abort, release)."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(EngineError("the engine has stopped"))
            else:
                self._inbox.put((future, function))
        return future

    def seconds_since_progress(self) -> float:
        """0 when idle; otherwise how long ago the engine last got on with its work. Grows while
        the model hangs, and while sequences run without getting anywhere."""
        progress_at = self._progress_at
        return 0.0 if progress_at is None else time.monotonic() - progress_at

    def _run(self) -> None:
        try:
            may_wait = True
            while not self._is_stopping.is_set():
                self._serve_calls(may_wait)
                self._keep_pace()
                if self._is_stopping.is_set():
                    break
                may_wait = not self._step()
        except BaseException as error:
            logger.exception("the engine's thread crashed")
            self._close()
            self._deliver()
            self._on_crash(error)
        finally:
            self._close()
            self._deliver()

    def _step(self) -> bool:
        """Whether another step makes sense at once."""
        if not self._engine.has_work():
            return False
        self._mark_busy()
        began = time.monotonic()
        outputs = self._engine.step(self._deliver)
        if self._engine.ran_model:  # what only admits leaves the cores as they are
            self._step_began_at = began
        self._undelivered += outputs
        if self._engine.made_progress:
            self._progress_at = time.monotonic()
        if not self._engine.made_progress or not self._engine.has_work():
            self._deliver()
        return self._engine.made_progress

    def _deliver(self, more: Sequence[SequenceOutput] = ()) -> None:
        outputs, self._undelivered = [*self._undelivered, *more], []
        if outputs:
            self._on_outputs(outputs)

    def _serve_calls(self, may_wait: bool) -> None:
        """Runs the calls that are there now; waits for one first if nothing else is to be done."""
        if may_wait:
            if not self._engine.num_running:
                self._progress_at = None
                if self._checks_when_idle:
                    self._engine.check_integrity()
            timeout = _RETRY_SECONDS if self._engine.has_work() else None
            try:
                item = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return
            self._mark_busy()
            self._serve(item)
        # Only those: a flood of calls must not keep the engine from stepping.
        num_calls = self._inbox.qsize()
        if num_calls:
            self._deliver()
        for _ in range(num_calls):
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:  # `stop` was faster
                return
            self._serve(item)

    def _keep_pace(self) -> None:
        """Serves calls until the next step may begin: for a sequence whose KV has just come, whose
        reader has waited for the hand-over already, at once."""
        engine = self._engine
        while self._pace and engine.num_running and not engine.has_prompts and not engine.has_fresh:
            left = self._step_began_at + self._pace - time.monotonic()
            if left <= 0 or self._is_stopping.is_set() or not self._prompt_is_read():
                return
            self._deliver()
            try:
                item = self._inbox.get(timeout=left)
            except queue.Empty:
                return
            self._serve(item)

    def _mark_busy(self) -> None:
        if self._progress_at is None:
            self._progress_at = time.monotonic()

    def _serve(self, item: _Call | None) -> None:
        if item is None:
            return
        future, function = item
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(self._engine)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _close(self) -> None:
        """Refuses new calls and fails those that have not run."""
        with self._lock:
            self._is_closed = True
            while True:
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    return
                if item is not None and item[0].set_running_or_notify_cancel():
                    item[0].set_exception(EngineError("the engine has stopped"))
