"""The router as a supervised child process."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from cluster.backoff import Backoff
from core.errors import DeadlineError, UnavailableError

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class RouterProcess:
    """Owns one router process and its log file. It runs in a process group of its own, so that
    a terminal's Ctrl-C reaches it through its owner alone, and it never outlives this process. Not
    in a session of its own: Linux shares processors out among sessions first (autogroups), and a
    router that had just read a long prompt then waited up to 100 ms for its workers' compute.
    Once it was healthy, an unexpected end is answered with a restart, after a growing pause."""

    def __init__(self, arguments: Sequence[str], url: str, log_path: Path) -> None:
        """`arguments`: of `python -m`, the module first. `url`: where it serves HTTP."""
        self._arguments = arguments
        self._url = url
        self._log_path = log_path
        self._backoff = Backoff(first_s=0.5)
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._log_start = 0  # where the present process's part of the log begins

    async def start(self, timeout_s: float = 60.0) -> None:
        """Starts it and waits until it answers /health. Raises UnavailableError with the router's
        own words if it exits instead."""
        await self._spawn()
        await self.wait_for("/health", timeout_s)
        self._keeper = asyncio.create_task(self._keep(), name="router keeper")

    async def wait_for(self, path: str, timeout_s: float) -> None:
        """Waits until GET `path` answers 200."""
        deadline = time.monotonic() + timeout_s
        # Its own child on this machine is asked whether it lives, and told nothing: the certificate
        # is of the name that clients use, not of this one.
        async with httpx.AsyncClient(
            base_url=self._url, timeout=2.0, trust_env=False, verify=False
        ) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(path)).status_code == 200:
                        return
                if self._keeper is None and not self.is_running:
                    raise UnavailableError(self._last_words())
                await asyncio.sleep(_POLL_S)
        raise DeadlineError(f"the router's {path} is not well after {timeout_s:g} s")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()

    async def _spawn(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cluster.tied_child",
                str(os.getpid()),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def _keep(self) -> None:
        while True:
            assert self._process is not None, "spawned before"
            started = time.monotonic()
            code = await self._process.wait()
            pause = self._backoff.after_death(time.monotonic() - started)
            logger.warning(
                "the router ended with code %s (%s); starting again in %.1f s",
                code, self._last_words(), pause,
            )  # fmt: skip
            await asyncio.sleep(pause)
            await self._spawn()

    def _signal(self, number: signal.Signals) -> None:
        """To its whole group: it may have children of its own."""
        assert self._process is not None, "spawned before"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read()[-4096:].decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        if not said:
            return f"the router ended without a word, see {self._log_path}"
        return f"router: {said[-1].removeprefix('pdserve: error: ').removeprefix('router: ')}"
