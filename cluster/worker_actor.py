"""The Ray actor around one worker. It runs in the worker's own process."""

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.errors import ConfigError, ModelError
from core.logs import use_format
from core.types import Role
from core.worker_settings import WorkerSettings
from rpc.cluster_token import set_cluster_token
from rpc.tls import use_internal_tls

logger = logging.getLogger(__name__)

WORKER_CLASSES = {
    Role.PREFILL: "prefill_worker:PrefillWorker",
    Role.DECODE: "decode_worker:DecodeWorker",
    Role.COLOCATED: "decode_worker:DecodeWorker",
}
# After a crash of the engine the actor lives this long, for its owner to read why.
_LAST_WORDS_S = 5.0
_PARENT_CHECK_S = 1.0
_ANSWER_S = 0.1
FOLLOWER_CLASS = "worker.follower:FollowerWorker"


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Either `info`, a serialized WorkerInfo, or `error`. A permanent error is one that the next
    start would meet again: a wrong configuration, a model that cannot be loaded."""

    info: bytes = b""
    error: str = ""
    is_permanent: bool = False


class WorkerActor:
    """Owns one worker from start to stop; never restarted in place, so one process is one
    incarnation. Every method runs on one asyncio loop; the worker keeps long work off it."""

    def __init__(self, worker_class: str, log_path: str | None) -> None:
        self._worker_class = worker_class
        self._worker: Any = None
        self._progress = "starting its process"
        self._rendezvous: socket.socket | None = None
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        if log_path is not None:
            _log_to(Path(log_path))

    async def open_rendezvous(self, host: str) -> str:
        """Of rank 0 of several: the address where they will meet, on a free port. `host` is as in
        the settings of `start`, which comes next."""
        self._rendezvous = socket.create_server((host or _node_address(), 0))
        address = self._rendezvous.getsockname()
        return f"{address[0]}:{address[1]}"

    async def start(self, settings: WorkerSettings) -> StartOutcome:
        """Builds and starts the worker. `settings.host` "" stands for this node's address."""
        # Ray sets 1. Read by OpenMP when torch is imported, which has not happened yet.
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        # Between two steps its threads would spin for milliseconds, on cores that others need.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        # The worker may be on another machine: then it is not in the environment yet.
        set_cluster_token(settings.cluster_token)
        use_format(settings.config.log_format)
        try:
            use_internal_tls(settings.config)
            self._progress = "importing"
            if not settings.host:
                settings = replace(settings, host=_node_address())
            if self._rendezvous is not None:
                settings = replace(settings, rendezvous_fd=self._rendezvous.detach())
            module, _, name = self._worker_class.partition(":")
            worker = getattr(importlib.import_module(module), name)(settings)
            await worker.start(self._report)
            self._worker = worker
            return StartOutcome(info=worker.info.SerializeToString())
        except (ConfigError, ModelError) as error:
            logger.error("cannot start: %s", error)
            return StartOutcome(error=str(error), is_permanent=True)
        except Exception as error:
            logger.exception("cannot start")
            return StartOutcome(error=f"{type(error).__name__}: {error}")

    async def progress(self) -> str:
        """What the start is doing now, for people."""
        return self._progress

    async def watch(self) -> str:
        """Returns why the worker failed, when it does. The process then ends by itself."""
        await asyncio.wait([self._worker.failed])
        failed: asyncio.Future[Any] = self._worker.failed
        if failed.cancelled():
            return "stopped"
        reason = failed.exception() or failed.result()
        logger.error("the worker failed and its process ends: %s", reason)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, 1)
        return f"{type(reason).__name__}: {reason}"

    async def drain(self, grace_s: float) -> bool:
        """Takes nothing new. Returns True as soon as nothing runs here any more, False when the
        grace has run out before that."""
        return self._worker is None or await self._worker.drain(grace_s)

    async def num_requests(self) -> int:
        """Requests that are here now, in whatever stage."""
        return 0 if self._worker is None else self._worker.num_requests

    async def stop(self, grace_s: float) -> None:
        """Ends what runs and closes everything, within about `grace_s`. A moment after the answer
        the process exits with 0."""
        if self._worker is not None:
            await self._worker.stop(grace_s)
        logger.info("stopped")
        asyncio.get_running_loop().call_later(_ANSWER_S, os._exit, 0)

    def _report(self, what: str) -> None:
        self._progress = what
        logger.info("%s", what)


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def _end_with(parent_pid: int) -> None:
    """Ends this process soon after its raylet has died. Ray does so too, but may take a minute,
    in which the memory is missing and a second deployment meets the first."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def _log_to(path: Path) -> None:
    """Sends logging, prints and the last words of native code to one file, by name of the worker
    instead of Ray's by number. Earlier lives of the worker stay above in the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=os.fdopen(2, "w", buffering=1, closefd=False),
        force=True,
    )
