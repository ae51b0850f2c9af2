"""Ends a controller that hangs, so that Ray starts it again.

Ray restarts an actor that has died. One that is stopped, or whose event loop is blocked, lives on
and answers nobody. So the controller has a child that hears a beat of its event loop, and kills it
when the beats stay away. It needs neither Ray nor a network, and is wherever the controller is.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
_SCRIPT = Path(__file__).with_name("watchdog_process.py")
_BEAT_S = 0.5


class Watchdog:
    """Owns the child and the pipe to it, from `start` to the end of this process, which ends the
    child too, however it comes. A child that has died is replaced."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._child: subprocess.Popen[bytes] | None = None
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """To be called on the event loop that is to be watched."""
        self._beating = asyncio.create_task(self._beat(), name="watchdog")

    async def _beat(self) -> None:
        while True:
            try:
                if self._child is None or self._child.poll() is not None:
                    self._child = self._spawn()
                assert self._child.stdin is not None
                with contextlib.suppress(BlockingIOError):  # the child is stopped itself
                    os.write(self._child.stdin.fileno(), b".")
            except OSError as error:  # the next beat tries again
                logger.warning("nobody watches over this process: %s", error)
            await asyncio.sleep(_BEAT_S)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        # Isolated and without site-packages: it starts in a moment, and stays small.
        command = [sys.executable, "-I", "-S", str(_SCRIPT), str(self._patience_s)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child
