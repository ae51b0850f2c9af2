"""The thread that moves blocks: every call to NIXL of a worker is made here.

Reads of all peers go on side by side, each in batches of about 2 MiB with a few under way, so that
a stalled peer holds up nobody, a cancel takes effect between two batches, and one pull does not
starve another. With nothing to do the thread sleeps on its queue.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import HandoverError
from kv_transfer.nixl_agent import Connection, NixlAgent, NixlOffer, ReadBatch

logger = logging.getLogger(__name__)

_MAX_BATCHES_UNDER_WAY = 4
_BUSY_DELAY_S = 50e-6
_DOUBT_DELAY_S = 5e-3


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # and quiet
    CANCELLED = "cancelled"  # and quiet
    IN_DOUBT = "in doubt"  # `on_quiet` follows


@dataclass(slots=True, eq=False)
class Job:
    """One pull. The caller fills the first part and may then only call `Mover.cancel`. `on_end`
    is called once, in the mover's thread; after IN_DOUBT `on_quiet` is, when the copy is over."""

    worker_id: str
    offer: NixlOffer
    batches: Sequence[ReadBatch]  # at least one
    on_end: Callable[[Outcome, Exception | None, str], None]  # with the carrier
    on_quiet: Callable[[], None]
    # The mover's own.
    connection: Connection | None = None
    num_posted: int = 0
    handles: list[int] = field(default_factory=list)
    error: Exception | None = None
    is_cancelled: bool = False
    is_in_doubt: bool = False
    quiet_by: float = 0.0  # without progress until then the job is in doubt


class Mover:
    """Owns the thread, the agent's use and the connections, at most one for each worker.

    A connection with reads under way is never taken down: it leaves the table and waits in
    `_leaving` for the last of them."""

    def __init__(self, agent: NixlAgent, liveness_s: float, cancel_s: float) -> None:
        self._agent = agent
        self._liveness_s = liveness_s
        self._cancel_s = min(cancel_s, liveness_s)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._connections: dict[str, Connection] = {}
        self._leaving: list[Connection] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called from other threads

    def submit(self, job: Job) -> None:
        self._commands.put(lambda: self._start(job))

    def cancel(self, job: Job) -> None:
        """Posts no further batch; the job ends when those under way are over."""
        self._commands.put(lambda: self._cancel(job))

    def forget(self, worker_id: str) -> None:
        self._commands.put(lambda: self._drop(worker_id))

    def stop(self) -> bool:
        """Fails the jobs, waits for their reads and ends the thread; blocks for at most the
        liveness bound. Returns whether everything is quiet: if not, the thread and the agent
        stay, since bytes may still land in the tensor."""
        self._commands.put(self._stop)
        self._thread.join(self._liveness_s + 1)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._jobs or not self._is_stopping:
            self._take_commands()
            moved = False
            for job in list(self._jobs):
                moved |= self._advance(job)
            if self._jobs and not moved:
                is_waiting = all(job.is_in_doubt for job in self._jobs)
                self._take_commands(_DOUBT_DELAY_S if is_waiting else _BUSY_DELAY_S)
        for worker_id in list(self._connections):
            self._drop(worker_id)
        self._agent.close()

    def _take_commands(self, wait_s: float = 0.0) -> None:
        """Runs what was asked for. Waits `wait_s` for it, or for ever if there are no jobs."""
        try:
            if not self._jobs and not self._is_stopping:
                self._commands.get()()
            elif wait_s:
                self._commands.get(timeout=wait_s)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _start(self, job: Job) -> None:
        if self._is_stopping:
            job.on_end(Outcome.FAILED, HandoverError("the KV transport is closed"), "")
            return
        try:
            job.connection = self._connect(job)
        except Exception as error:
            job.on_end(Outcome.FAILED, error, "")
            return
        job.quiet_by = time.monotonic() + self._liveness_s
        self._jobs.append(job)

    def _connect(self, job: Job) -> Connection:
        current = self._connections.get(job.worker_id)
        if current is not None and current.offer == job.offer:
            return current
        self._drop(job.worker_id)
        if any(old.offer.agent_name == job.offer.agent_name for old in self._leaving):
            raise HandoverError("an earlier transfer from it is still in doubt")
        connection = self._agent.connect(job.offer)
        self._connections[job.worker_id] = connection
        return connection

    def _drop(self, worker_id: str) -> None:
        connection = self._connections.pop(worker_id, None)
        if connection is None:
            return
        if connection.reads:
            self._leaving.append(connection)
        else:
            self._agent.disconnect(connection)

    def _cancel(self, job: Job) -> None:
        if job in self._jobs and not job.is_cancelled:
            job.is_cancelled = True
            job.quiet_by = min(job.quiet_by, time.monotonic() + self._cancel_s)

    def _stop(self) -> None:
        self._is_stopping = True
        for job in self._jobs:
            job.error = job.error or HandoverError("the KV transport was closed")

    def _advance(self, job: Job) -> bool:
        """One round for one job: look at its reads, post the next batch, or end it. Returns
        whether anything happened."""
        connection = job.connection
        assert connection is not None
        moved = self._poll(job, connection)
        is_complete = job.num_posted == len(job.batches)
        may_post = not (is_complete or job.error or job.is_cancelled or job.is_in_doubt)
        if may_post and len(job.handles) < _MAX_BATCHES_UNDER_WAY:
            self._post(job, connection)
            moved = True
            is_complete = job.num_posted == len(job.batches)
        if not job.handles and (is_complete or job.error or job.is_cancelled or job.is_in_doubt):
            self._end(job, connection)
            return True
        now = time.monotonic()
        if moved and not job.is_cancelled:
            job.quiet_by = now + self._liveness_s
        elif now > job.quiet_by and not job.is_in_doubt:
            job.is_in_doubt = True
            self._retire(job)
            job.on_end(Outcome.IN_DOUBT, job.error, "")
        return moved

    def _poll(self, job: Job, connection: Connection) -> bool:
        running = []
        for handle in job.handles:
            try:
                is_over = self._agent.is_done(handle)
            except Exception as error:
                self._fail(job, error)
                is_over = True
            if is_over:
                connection.reads -= 1
            else:
                running.append(handle)
        moved = len(running) < len(job.handles)
        job.handles = running
        return moved

    def _post(self, job: Job, connection: Connection) -> None:
        try:
            handle = self._agent.post_read(connection, job.batches[job.num_posted])
        except Exception as error:
            self._fail(job, error)
            return
        job.num_posted += 1
        if handle is not None:
            job.handles.append(handle)
            connection.reads += 1

    def _end(self, job: Job, connection: Connection) -> None:
        """Everything that the job posted is over."""
        self._jobs.remove(job)
        if connection in self._leaving and connection.reads == 0:
            self._leaving.remove(connection)
            self._agent.disconnect(connection)
        if job.is_in_doubt:
            job.on_quiet()
        elif job.error is not None:
            job.on_end(Outcome.FAILED, job.error, "")
        elif job.is_cancelled and job.num_posted < len(job.batches):
            job.on_end(Outcome.CANCELLED, None, "")
        else:
            job.on_end(Outcome.DONE, None, self._agent.carrier(connection))

    def _fail(self, job: Job, error: Exception) -> None:
        job.error = job.error or error
        self._retire(job)

    def _retire(self, job: Job) -> None:
        """The next pull from this worker connects anew, unless somebody has done so already."""
        if self._connections.get(job.worker_id) is job.connection:
            self._drop(job.worker_id)
