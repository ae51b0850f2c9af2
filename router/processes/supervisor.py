"""Several router processes on one pair of ports (`router.workers`), and one that watches them.

The kernel shares the connections out (SO_REUSEPORT). A process that ends unasked is started again
after a growing pause, and its connections are all that is lost; what it held on workers, they free
as for any router that dies. Nobody outlives the supervisor: its processes read on a pipe that ends
with it.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from core.config import Config
from core.errors import ConfigError
from router.processes.share import socket_path

logger = logging.getLogger(__name__)

_GRACE_S = 15.0  # above the grace that a router gives to its streams
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_STABLE_S = 60.0  # after so long a life the pauses begin anew
_POLL_S = 0.05


class Supervisor:
    """Owns the processes and their folder from `run`'s beginning to its end."""

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        """`arguments`: of `python -m router`, for each process."""
        self._count = config.router.workers
        self._config = config
        self._arguments = list(arguments)
        self._stop = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        """Until SIGTERM or SIGINT. Returns the exit code: 1 if a process could not start, whose
        own words are then the last on stderr. Raises ConfigError if a port is taken."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        with tempfile.TemporaryDirectory(prefix="pdserve-router-") as folder:
            for key in ("http", "grpc"):
                address = _claimed(key, getattr(self._config.router, key))
                self._arguments += ["--set", f"router.{key}='{address}'"]
            stop = asyncio.create_task(self._stop.wait())
            keepers: list[asyncio.Task[None]] = []
            try:
                # The first one alone: what keeps it from starting, keeps all.
                for index in range(self._count):
                    first = await self._spawn(index, Path(folder))
                    if not await self._has_started(first, socket_path(Path(folder), index)):
                        return 0 if self._stop.is_set() else 1
                    keeper = self._keep(index, first, Path(folder))
                    keepers.append(asyncio.create_task(keeper, name=f"keeper of {index}"))
                logger.info("%d router processes", self._count)
                await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
                return 0
            finally:
                for task in (stop, *keepers):
                    task.cancel()
                await asyncio.gather(stop, *keepers, return_exceptions=True)
                await asyncio.gather(*map(_end, self._running.values()))

    async def _has_started(self, process: asyncio.subprocess.Process, path: Path) -> bool:
        while not path.exists():
            if process.returncode is not None or self._stop.is_set():
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _keep(self, index: int, process: asyncio.subprocess.Process, folder: Path) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            code = await process.wait()
            failures = 0 if time.monotonic() - began > _STABLE_S else failures
            pause = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            failures += 1
            logger.warning(
                "router process %d ended with code %s; starting again in %.1f s",
                index, code, pause,
            )  # fmt: skip
            await asyncio.sleep(pause)
            process = await self._spawn(index, folder)

    async def _spawn(self, index: int, folder: Path) -> asyncio.subprocess.Process:
        socket_path(folder, index).unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *self._arguments,
            "--share-folder", str(folder), "--share-index", str(index),
            stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._running[index] = process
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL after the grace."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _claimed(key: str, address: str) -> str:
    """The address with a port that nobody else listens on, who would get a part of the
    connections. Raises ConfigError if it is taken."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        with socket.create_server((bare, int(port)), family=family) as probe:
            return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"router.{key}: cannot listen on {address}: {reason}") from None
