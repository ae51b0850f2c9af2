"""What `pdserve up` does once Ray is there: it starts or finds the controller, runs the router, and
tells their story."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import httpx

from cli.client import key_header
from cli.log_tail import tail_logs
from cli.preflight import client_address, split_address
from cli.state import Deployment, deployment_name, forget, register, wanted_path
from cli.stop_signals import StopSignals
from cli.terminal import Reporter
from cluster.actor_process import node_address
from cluster.attach import attach
from cluster.changes import changes_between
from cluster.controller_actor import ControllerSpec, Facts
from cluster.controller_client import ControllerClient
from cluster.process_tree import identify
from cluster.ray_session import RaySession
from cluster.router_process import RouterProcess
from cluster.worker_slot import SlotOptions
from core.config import Config
from core.errors import UnavailableError
from rpc import cluster_pb2
from rpc import worker_pb2 as pb
from rpc.cluster_token import cluster_token, set_cluster_token
from rpc.tls import internal_tls

_READY_S = 60.0  # from the last worker's start to the router's word that a pair can serve
_GRACE_S = 5.0
_CHECK_RAY_S = 0.5
_CLUSTER_PLACEMENT_S = 900.0
_STOP_S = 45.0  # a worker's grace, the end of its engine, Ray's calls


class Foreground:
    """Owns the router of one deployment while its loop runs, and speaks for the user to its
    controller, which has a process of its own. Whatever ends `run`, both are stopped: the router
    first, so that no request meets a worker that is gone. A kill ends the router, and a local Ray
    with all workers; on somebody else's cluster the deployment goes on, for the next `pdserve up`.
    """

    def __init__(
        self,
        config: Config,
        model_name: str,
        model_path: Path,
        log_dir: Path,
        reporter: Reporter,
        worker_classes: dict[str, str],
        verbose: bool,
        ray_session: RaySession,
        bind: str,
    ) -> None:
        self._config = config
        self._model_name = config.served_model_name or model_name
        self._log_dir = log_dir
        self._reporter = reporter
        self._worker_classes = worker_classes
        self._verbose = verbose
        self._ray = ray_session
        self._bind = split_address(bind)
        self._model_path = model_path
        scheme = "https" if config.router.tls is not None else "http"
        self._url = f"{scheme}://{client_address(config.router.http)}"
        self._is_ready = False
        self._stop_asked = asyncio.Event()

    async def run(self, router: Sequence[str], config_path: str, signals: StopSignals) -> None:
        """Serves until a signal or a Shutdown call. `router`: the router's module and arguments,
        without the controller's address; empty where routers run elsewhere. Raises PdserveError
        if it cannot start."""
        signals.notify(asyncio.get_running_loop(), self._stop_asked.set)
        router_process: RouterProcess | None = None
        async with contextlib.AsyncExitStack() as stack:
            controller: ControllerClient | None = None
            deployment: Deployment | None = None
            try:
                facts = await self._attach(has_router=bool(router))
                address = client_address(facts.address)
                controller = await stack.enter_async_context(
                    ControllerClient(address, self._locate if router else None)
                )
                deployment = self._deployment(address, config_path)
                register(deployment)
                if router:
                    arguments, log_path = [*router, "--controller", address], "router.log"
                    router_process = RouterProcess(arguments, self._url, self._log_dir / log_path)
                async with self._told(controller, deployment):
                    await self._serve(controller, router_process)
            finally:
                signals.stopping()
                self._reporter.doing("Stopping")
                if router_process is not None:
                    await router_process.stop(_GRACE_S)
                if controller is not None:
                    await self._stop_workers(controller)
                if deployment is not None:
                    forget(deployment)

    async def _attach(self, has_router: bool) -> Facts:
        """Starts the controller, or finds it. Where it needs nothing of this process, because Ray
        is somebody else's, this process needs nothing of Ray from then on."""
        options = SlotOptions(
            deployment=deployment_name(self._config.router.http),
            log_dir=str(self._log_dir),
            worker_classes=self._worker_classes,
        )
        if not has_router:  # as on Kubernetes, where nodes may have to be started first
            options = replace(options, placement_timeout_s=_CLUSTER_PLACEMENT_S)
        host, port = self._bind
        spec = ControllerSpec(
            self._config, options, host, port, node_address(), self._log_dir,
            wanted_path(self._config.router.http), cluster_token(), self._model_path,
        )  # fmt: skip
        facts, is_found = await asyncio.to_thread(attach, spec)
        set_cluster_token(facts.cluster_token)
        self._ray.leave()
        if is_found:
            self._reporter.done("The deployment runs already: going on with it as it is")
            if keys := [c.key for c in changes_between(facts.config, self._config)]:
                self._reporter.warn(
                    f"the file differs in {', '.join(keys)}; `pdserve apply` makes it so"
                )
            self._config = facts.config.model_copy(update={"router": self._config.router})
        return facts

    async def _locate(self) -> str:
        """Where the router hears from, or looks for, a controller that is away."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            # Its own child on this machine, as RouterProcess asks it.
            async with httpx.AsyncClient(
                base_url=self._url, timeout=2.0, trust_env=False, verify=False, headers=key_header()
            ) as client:
                return client_address((await client.get("/cluster")).json()["controller"])
        return ""

    async def _serve(self, controller: ControllerClient, router: RouterProcess | None) -> None:
        starting = asyncio.create_task(self._start(controller, router))
        stop = asyncio.create_task(self._until_stopped())
        try:
            await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await stop
        finally:
            starting.cancel()
            stop.cancel()
            await asyncio.gather(starting, stop, return_exceptions=True)

    async def _until_stopped(self) -> None:
        """Returns when somebody asks for the end, or when the workers have ended with Ray."""
        while not self._ray.is_over:
            if said := self._ray.keep_head():
                self._reporter.warn(said)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_RAY_S):
                    await self._stop_asked.wait()
                return

    async def _stop_workers(self, controller: ControllerClient) -> None:
        """By the controller, as long as Ray is there: it may end while it is being asked."""
        stopping = asyncio.create_task(controller.shutdown(_STOP_S))
        while not stopping.done():
            await asyncio.wait([stopping], timeout=_CHECK_RAY_S)
            if not stopping.done() and self._ray.lost:
                self._abandon_ray(was_asked=self._stop_asked.is_set())
        if not stopping.result() and self._config.ray.address is not None:
            raise UnavailableError(
                "not all has ended: the controller does not answer, or waits for Ray's head; "
                "`pdserve down` ends the rest"
            )

    def _abandon_ray(self, was_asked: bool) -> NoReturn:
        """The end without Ray's head. A signal to the whole process group ends both together."""
        self._reporter.rest()
        if was_asked:
            self._reporter.say("stopped")
        else:
            what = self._ray.lost or "head"
            print(f"pdserve: error: Ray's {what} is gone; all is stopped", file=sys.stderr)
        self._ray.end()
        for stream in (sys.stdout, sys.stderr, self._reporter.console.file):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(0 if was_asked else 1)  # a usual exit would call Ray once more

    async def _start(self, controller: ControllerClient, router: RouterProcess | None) -> None:
        """Workers and router start side by side; the first failure ends both. Without a router
        nobody waits here for the workers: what cannot run now is tried again, and said."""
        if router is None:
            self._is_ready = True
            self._reporter.rest()
            self._reporter.done(f"Controller at {controller.address}, for {self._pools()}")
            return
        tasks = [
            asyncio.create_task(controller.wait_ready()),
            asyncio.create_task(router.start()),
        ]
        try:
            for first in asyncio.as_completed(tasks):
                await first
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if all(getattr(self._config.pools, p).replicas for p in self._config.active_pools):
            await router.wait_for("/ready", _READY_S)
        self._is_ready = True
        self._reporter.rest()
        self._announce()

    def _deployment(self, controller: str, config_path: str) -> Deployment:
        me = identify(os.getpid())
        assert me is not None, "this process exists"
        return Deployment(
            http=self._config.router.http,
            url=self._url,
            pid=me.pid,
            start_ticks=me.start_ticks,
            controller=controller,
            config=os.path.abspath(config_path),
            log_dir=str(self._log_dir),
            token=cluster_token(),
            tls=asdict(files) if (files := internal_tls()) is not None else None,
            ray=self._config.ray.address,
        )

    # ------------------------------------------------------------ the story

    @contextlib.asynccontextmanager
    async def _told(
        self, controller: ControllerClient, deployment: Deployment
    ) -> AsyncIterator[None]:
        """Tells of the workers: their loading at first, their deaths and returns later."""
        telling = [asyncio.create_task(self._tell(controller, deployment), name="tell")]
        if self._verbose:
            shown = frozenset({"up.log"})  # by logging itself
            tail = tail_logs(self._log_dir, lambda line: print(line, file=sys.stderr), shown)
            telling.append(asyncio.create_task(tail, name="tail"))
        try:
            yield
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)

    async def _tell(self, controller: ControllerClient, deployment: Deployment) -> None:
        states: dict[str, int] = {}
        is_away = False
        async for view in controller.views():
            if view is None:
                is_away = True
                self._reporter.warn("the controller is away; requests go on")
                continue
            if is_away:
                is_away = False
                self._reporter.done("the controller is back")
                if controller.address != deployment.controller:
                    deployment = replace(deployment, controller=controller.address)
                    register(deployment)
                    self._reporter.done(f"it is at {controller.address} now")
            if view.is_ending:
                self._stop_asked.set()
            present = {worker.id for worker in view.workers}
            for gone in states.keys() - present:
                del states[gone]
                if self._is_ready:
                    self._reporter.done(f"{gone} is gone")
            for worker in view.workers:
                before = states.get(worker.id)
                states[worker.id] = worker.state
                if worker.state == before:
                    continue
                if worker.state == pb.WORKER_STATE_READY:
                    self._reporter.done(f"{worker.id} is ready (pid {worker.pid})")
                elif worker.state == pb.WORKER_STATE_DEAD:
                    self._reporter.warn(f"{worker.id} died: {worker.detail}")
                elif worker.state == pb.WORKER_STATE_DRAINING and before is not None:
                    self._reporter.done(f"{worker.id} is draining")
            if not self._is_ready:
                self._reporter.doing(_loading(view))

    def _pools(self) -> str:
        config = self._config
        pools = (f"{getattr(config.pools, pool).replicas} {pool}" for pool in config.active_pools)
        return f"{' and '.join(pools)} worker(s)"

    def _announce(self) -> None:
        config = self._config
        body = (
            f'{{"model": "{self._model_name}", "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
        )
        say = self._reporter.say
        self._reporter.done(f"Ready: {self._model_name} on {self._pools()}")
        say(f"  HTTP  {self._url}  (OpenAI's API; also /cluster and /metrics)")
        say(f"  gRPC  {client_address(config.router.grpc)}")
        say(f"  logs  {self._log_dir}")
        say("Try, in another terminal:")
        say(
            f"  curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d '{body}'"
        )
        say(f"  {_own_command()} chat{_url_option(self._url)}")
        say("Ctrl-C stops it.")


def _loading(view: cluster_pb2.ClusterView) -> str:
    starting = [w for w in view.workers if w.state == pb.WORKER_STATE_STARTING]
    if not starting:
        return "Waiting for the router"
    return "Starting workers: " + " · ".join(f"{w.id}: {w.detail or 'starting'}" for w in starting)


def _own_command() -> str:
    """How to call this command from the same folder."""
    if shutil.which("pdserve"):
        return "pdserve"
    return os.path.relpath(Path(sys.executable).parent / "pdserve")


def _url_option(url: str) -> str:
    return "" if url == "http://127.0.0.1:8000" else f" --url {url}"
