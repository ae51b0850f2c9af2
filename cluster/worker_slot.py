"""One worker that is wanted: started, watched, replaced.

    waiting for resources -> starting -> ready -> died -> pause -> waiting for resources ...

Every life is a fresh actor in a fresh placement group, with a fresh incarnation; a tensor-parallel
worker has one actor for each rank, and all of them live and die together. A slot of a controller
that has come back begins with the life that it has found.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.backoff import Backoff
from cluster.lives import NAMESPACE, Life, new_life_name
from cluster.placement import PlacementError, actor_options, held, reserved
from cluster.view import ViewPublisher
from cluster.wanted import Notice
from cluster.worker_actor import (
    DUAL_CLASS,
    FOLLOWER_CLASS,
    WORKER_CLASSES,
    StartOutcome,
    WorkerActor,
)
from core.config import PoolConfig
from core.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    PdserveError,
    UnavailableError,
)
from core.types import Role, WorkerState
from core.worker_settings import WorkerSettings
from rpc import cluster_pb2 as pb
from rpc import codec
from rpc import worker_pb2 as worker_pb

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 0.3
_CALL_TIMEOUT_S = 10.0
_SWITCH_S = 15.0  # a change of role, beside what runs before it
_LAST_WORDS_S = 2.0  # of rank 0 when another rank has died
_EXIT_S = 3.0  # from a worker's answer that it has stopped to the end of its process


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """How workers are run, equal for all of a deployment. The waits are bounds, not delays."""

    deployment: str
    log_dir: str | None = None
    placement_timeout_s: float = 60.0
    start_timeout_s: float = 900.0
    drain_grace_s: float = 30.0  # for what runs on a worker that goes; then it is resumed elsewhere
    settle_s: float = 1.0  # a new worker must stay up so long before an old one goes for it
    backoff: Backoff = field(default_factory=Backoff)
    # By role value, "dual" for those of two roles, "follower" for further ranks: "module:Class".
    # What is not named here has its usual class.
    worker_classes: dict[str, str] = field(default_factory=dict)


class WorkerSlot:
    """Owns one worker id and the life that it has now: its placement group, its actors and its
    entry in the view. At most one life exists at a time; `first_ready` is set once, by the first
    one to become ready or by the error that makes it pointless to wait longer."""

    def __init__(
        self,
        settings: WorkerSettings,
        bundle: dict[str, float],
        publisher: ViewPublisher,
        options: SlotOptions,
        notice: Notice,
        is_trial: bool = False,
        life: Life | None = None,
    ) -> None:
        """`notice`: what the worker is told to remember; whoever changes it calls `tell`.
        `is_trial`: the first death before it was ready is the answer; nobody waits for more.
        `life`: one that was found, to begin with."""
        self.settings = settings
        self._notice = notice
        self._is_trial = is_trial
        self.first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_ready.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._bundle = bundle
        self._publisher = publisher
        self._options = options
        self._backoff = replace(options.backoff)
        self._found = life
        # By rank; the first one is the worker to everybody else.
        self._actors: list[Any] = life.actors if life is not None else []
        self._ready_at: float | None = None
        self._is_stopping = False
        self._life_over = asyncio.Event()
        self._entry = pb.WorkerEntry(
            id=settings.worker_id, role=codec.role_to_pb(settings.role), host=settings.host
        )
        if life is not None and life.info:
            self._know(worker_pb.WorkerInfo.FromString(life.info))
            self._publish(WorkerState.READY)
        else:
            self._publish(WorkerState.STARTING, "waiting for resources")
        self._task = asyncio.create_task(self._run(), name=f"slot {settings.worker_id}")

    @property
    def id(self) -> str:
        return self.settings.worker_id

    @property
    def _wishes(self) -> PoolConfig:
        """What the configuration says of its pool."""
        return self.settings.config.pools.named(self.pool)

    @property
    def pool(self) -> str:
        return self.settings.role.value

    @property
    def is_ready(self) -> bool:
        return self._entry.state == worker_pb.WORKER_STATE_READY

    async def num_requests(self) -> int:
        """Requests on it now; 0 for a worker that does not answer."""
        if not self._actors or not self.is_ready:
            return 0
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            return int(await _call(self._actors[0].num_requests.remote(), _CALL_TIMEOUT_S))
        return 0

    def tell(self) -> None:
        """Has the worker remember the notice as it is now; nobody waits for it. One that is not
        ready yet is told when it is."""
        if self._actors and self.is_ready:
            with contextlib.suppress(ray.exceptions.RayError):
                self._actors[0].remember.remote(self._notice.address, self._notice.wanted)

    def can_become(self, pool: str) -> bool:
        """Now, and without a new process."""
        return self.is_ready and pool != self.pool and pool in self.settings.roles

    async def switch(self, pool: str, grace_s: float) -> None:
        """Moves the worker that runs now to another pool; what runs there has its grace. Raises
        UnavailableError: then it is what it was, or its next life will be."""
        if not self._actors or not self.is_ready:
            raise UnavailableError(f"{self.id} is not ready")
        role, actor = Role(pool), self._actors[0]
        self._publish(WorkerState.DRAINING, f"becomes a {role} worker")
        try:
            switching = actor.switch.remote(role, grace_s)
            outcome: StartOutcome = await _call(switching, grace_s + _SWITCH_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            # Nobody knows what it is now.
            await asyncio.to_thread(ray.kill, actor)
            raise UnavailableError(f"{self.id} was lost while it became a {role} worker") from error
        if not self._actors or self._actors[0] is not actor:
            raise UnavailableError(f"{self.id} died as it became a {role} worker")
        if not outcome.error:
            self.settings = replace(self.settings, role=role)
            self._entry.role = codec.role_to_pb(role)
            self._know(worker_pb.WorkerInfo.FromString(outcome.info))
        self._publish(WorkerState.READY)
        if outcome.error:
            raise UnavailableError(f"{self.id} stays a {self.pool} worker: {outcome.error}")

    async def drain(self, grace_s: float) -> bool:
        """Takes nothing new and waits for what runs there, up to the grace. The worker is not
        started again; `stop` comes next. Returns False if something was still running."""
        self._is_stopping = True
        if not self._actors or not self.is_ready:
            return True
        self._publish(WorkerState.DRAINING, "draining")  # routers place nothing more there
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            call = self._actors[0].drain.remote(grace_s)
            return bool(await _call(call, grace_s + _CALL_TIMEOUT_S))
        return False

    async def stop(self, grace_s: float) -> None:
        """Ends the worker for good: asked first, killed after the grace. Idempotent."""
        self._is_stopping = True
        if self._entry.state == worker_pb.WORKER_STATE_READY:
            self._publish(WorkerState.DRAINING, "stopping")
        has_ended = False
        if self._actors:
            stops = [actor.stop.remote(grace_s) for actor in self._actors]
            calls = [_call(stop, grace_s + _CALL_TIMEOUT_S) for stop in stops]
            await asyncio.gather(*calls, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await self._life_over.wait()
                has_ended = True
        if not has_ended:  # else its place is being given back: a call of Ray, not to be abandoned
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.first_ready.cancel()
        self._publisher.remove(self.settings.worker_id)

    # ------------------------------------------------------------ lives

    async def _run(self) -> None:
        while not self._is_stopping:
            self._ready_at = None
            error = await self._live()
            # Loading is no proof of health: a life counts from the moment it was ready.
            lived_s = time.monotonic() - self._ready_at if self._ready_at is not None else 0.0
            pause = self._backoff.after_death(lived_s)
            hopeless = isinstance(error, ConfigError | PlacementError)
            if hopeless:
                pause = self._backoff.longest_s
            is_answer = hopeless or self._is_trial or self._backoff.is_crash_loop
            if is_answer and not self.first_ready.done():
                self.first_ready.set_exception(error)
            if self._is_stopping:
                return
            worker_id = self.settings.worker_id
            logger.warning("%s died: %s; starting again in %.1f s", worker_id, error, pause)
            self._publish(WorkerState.DEAD, f"{error.message}; starting again in {pause:.1f} s")
            await asyncio.sleep(pause)

    async def _live(self) -> PdserveError:
        """One life, from reservation to death. Returns what ended it."""
        worker_id, ranks = self.settings.worker_id, range(self.settings.num_ranks)
        self._life_over.clear()
        found, self._found = self._found, None
        if found is not None:
            reservation = held(found.group)
        else:
            self._forget_life()
            self._publish(WorkerState.STARTING, "waiting for resources")
            name = new_life_name(self._options.deployment, worker_id)
            patience_s, labels = self._options.placement_timeout_s, self._wishes.label_selector
            reservation = reserved(self._bundle, len(ranks), name, patience_s, labels)
        try:
            async with reservation as group:
                if found is None:  # in threads: the loop has other workers to care for
                    create = self._create_actor
                    made = [await asyncio.to_thread(create, name, group, rank) for rank in ranks]
                    self._actors = made
                try:
                    await self._start()
                    return EngineError(await _first_death(self._actors))
                finally:
                    self._life_over.set()
                    actors, self._actors = self._actors, []
                    for actor in actors:
                        await asyncio.to_thread(ray.kill, actor)
        except PdserveError as error:
            return error
        except ray.exceptions.RayError as error:
            return EngineError(_why_dead(error))
        except Exception as error:  # of Ray itself: a name not free yet, the head unreachable
            logger.exception("cannot run %s", worker_id)
            return EngineError(f"{type(error).__name__}: {error}")

    def _create_actor(self, name: str, group: PlacementGroup, rank: int) -> Any:
        role = self.settings.role
        worker_class = self._options.worker_classes.get(role.value, WORKER_CLASSES[role])
        if len(self.settings.roles) > 1:
            worker_class = self._options.worker_classes.get("dual", DUAL_CLASS)
        log_dir, log_name = self._options.log_dir, self.settings.worker_id
        if rank:
            worker_class = self._options.worker_classes.get("follower", FOLLOWER_CLASS)
            name, log_name = f"{name}:rank{rank}", f"{log_name}-rank{rank}"
        return (
            ray.remote(WorkerActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",  # it goes on when the controller dies, and is found again
                max_restarts=0,  # Ray would revive it without a new incarnation
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
                **actor_options(self._bundle, self._wishes.runtime_env),
            )
            .remote(worker_class, log_dir and f"{log_dir}/{log_name}.log")
        )

    async def _start(self) -> None:
        """Starts the worker in its actors, publishing its progress. Raises what went wrong."""
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                outcome = await self._start_ranks()
        except TimeoutError as error:
            raise DeadlineError(f"not ready after {self._options.start_timeout_s:g} s") from error
        self._know(worker_pb.WorkerInfo.FromString(outcome.info))
        self._ready_at = time.monotonic()
        self._publish(WorkerState.READY)
        self.tell()
        if not self.first_ready.done():
            self.first_ready.set_result(None)
        self._is_trial = False

    async def _start_ranks(self) -> StartOutcome:
        """Rank 0's outcome when all have started. Raises the first rank's error."""
        settings, leader = self.settings, self._actors[0]
        if len(self._actors) > 1:
            meeting = await leader.open_rendezvous.remote(settings.host)
            settings = replace(settings, rendezvous=meeting)
        starts = [
            asyncio.ensure_future(_started(actor, replace(settings, rank=rank)))
            for rank, actor in enumerate(self._actors)
        ]
        try:
            while True:
                done, pending = await asyncio.wait(
                    starts, timeout=_PROGRESS_EVERY_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for start in done:
                    start.result()
                if not pending:
                    return starts[0].result()
                if not self.is_ready:  # one that was found may be
                    self._publish(WorkerState.STARTING, await leader.progress.remote())
        except (EngineError, ray.exceptions.RayError):
            # The others lose this rank, or have been lost; one of them may know better why.
            await asyncio.wait(starts, timeout=_LAST_WORDS_S)
            for start in starts:
                if start.done() and isinstance(start.exception(), ConfigError):
                    start.result()
            raise
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    # ------------------------------------------------------------ the view

    def _know(self, info: worker_pb.WorkerInfo) -> None:
        self._entry.host, self._entry.pid = info.host, info.pid
        self._entry.address, self._entry.incarnation = info.address, info.incarnation

    def _forget_life(self) -> None:
        for name in ("pid", "address", "incarnation"):
            self._entry.ClearField(name)

    def _publish(self, state: WorkerState, detail: str = "") -> None:
        self._entry.state = codec.state_to_pb(state)
        self._entry.detail = detail
        published = pb.WorkerEntry()
        published.CopyFrom(self._entry)
        self._publisher.publish(published)


async def _started(actor: Any, settings: WorkerSettings) -> StartOutcome:
    outcome: StartOutcome = await actor.start.remote(settings)
    if outcome.error:
        raise (ConfigError if outcome.is_permanent else EngineError)(outcome.error)
    return outcome


async def _first_death(actors: list[Any]) -> str:
    """Why a worker has failed, as its rank 0 says it where that still can: it knows of the death
    of another rank by itself, and has its requests to end."""
    watches = [asyncio.ensure_future(_result(actor.watch.remote())) for actor in actors]
    try:
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(watches[:1], timeout=_LAST_WORDS_S)
        first = next(watch for watch in watches if watch.done())
        reason: str = first.result()
        return reason
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _result(ref: Any) -> Any:
    return await ref


async def _call(ref: Any, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await ref


def _why_dead(error: Exception) -> str:
    """The telling part of what Ray says of a dead actor."""
    text = str(getattr(error, "error_msg", "")) or str(error)
    for line in text.splitlines():
        if "exit" in line.lower() or "died" in line.lower() or "kill" in line.lower():
            text = line
            break
    else:
        if isinstance(error, ray.exceptions.RayTaskError):  # a traceback: its end says what it was
            text = text.rstrip().rpartition("\n")[2]
    return " ".join(text.split())[:300] or type(error).__name__
