"""A whole router in one asyncio loop: the registry, HTTP and gRPC, from start to stop."""

import asyncio
import logging

from grpc_health.v1 import health_pb2

from core.config import Config
from core.errors import ConfigError
from core.types import Role
from router.access.api_keys import KeyStore
from router.access.grpc_keys import KeyInterceptor
from router.access.usage import UsageFile
from router.app import make_app
from router.chat.tools import ChatReading
from router.grpc_service import SERVICE, add_public_services
from router.http.listen import listen, listen_locally
from router.http.server import HttpServer
from router.openai.frontend import Frontend
from router.placement.placer import Placer
from router.placement.queue_report import report_queue
from router.placement.registry import Registry
from router.placement.turnstile import Turnstile
from router.processes.share import Share
from router.processes.tally import Tally, TallyFile
from router.request.admission import Admission
from router.request.metrics import Metrics
from router.request.pipeline import Pipeline, Waits
from router.request.retry_budget import RetryBudget
from router.request.timeline import Timelines
from router.request.tracing import Tracer
from router.text.tokenizer import Tokenizer
from rpc.channel import bind_public, make_public_server
from rpc.tls import TlsFiles

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 10.0
_HEALTH_INTERVAL_S = 1.0
_JOIN_S = 5.0


class RouterServer:
    """Owns the listening sockets from construction to `close()`. Not reusable.

    `http_port` and `grpc_port` are the real ones, also where the configuration said 0.
    """

    def __init__(
        self,
        config: Config,
        model_name: str,
        tokenizer: Tokenizer,
        controller: str,
        waits: Waits = Waits(),
        share: Share | None = None,
    ) -> None:
        """Binds both addresses. Raises ConfigError that names the one that is taken. Needs a
        running loop. `share`: with other processes of this deployment, the ports included."""
        colocated = config.mode == "colocated"
        roles = (Role.COLOCATED,) if colocated else (Role.PREFILL, Role.DECODE)
        self.registry = Registry(controller, roles)
        metrics = Metrics(self.registry, config.router.slo)
        placer = Placer(self.registry, config.router.policy, config.router.max_local_prefill_tokens)
        self._tally = TallyFile(share) if share is not None else None
        self._turnstile = Turnstile(
            placer,
            config.router.max_queued_requests,
            config.router.slo.ttft,
            metrics.queued.set,
            self._tally.queued if self._tally is not None else Tally(),
        )
        self.registry.on_room = self._turnstile.wake
        endpoint = config.router.otlp_endpoint
        self._tracer = Tracer(endpoint) if endpoint is not None else None
        self.admission = Admission(
            config.router.max_concurrent_requests,
            metrics,
            self._tally.in_flight if self._tally is not None else Tally(),
        )
        self.frontend = self._make_frontend(config, model_name, tokenizer, placer, metrics, waits)
        path = config.router.api_keys_file
        self._usage = UsageFile(share) if share is not None and path is not None else None
        keys = KeyStore(path, shared=self._usage) if path is not None else None
        tls = _tls_of(config)
        self._listener = listen(config.router.http, share is not None)
        self.http_port: int = self._listener.getsockname()[1]
        self._http = HttpServer(make_app(self.frontend, config, keys, share), tls)
        # For the other processes: this one's own part, behind a socket of theirs alone.
        self._own_http = HttpServer(make_app(self.frontend, config)) if share is not None else None
        self._share = share
        self.interceptors = [KeyInterceptor(keys)] if keys is not None else []
        self._grpc = make_public_server(self.interceptors, reuse_port=share is not None)
        self._health = add_public_services(self._grpc, self.frontend, keys)
        try:
            self.grpc_port = bind_public(self._grpc, config.router.grpc, tls)
        except RuntimeError:
            self._listener.close()
            raise ConfigError(f"router.grpc: cannot listen on {config.router.grpc}") from None
        self._tasks: list[asyncio.Task[None]] = []
        self._controller = controller
        self._reporting: asyncio.Task[None] | None = None

    def _make_frontend(
        self,
        config: Config,
        model_name: str,
        tokenizer: Tokenizer,
        placer: Placer,
        metrics: Metrics,
        waits: Waits,
    ) -> Frontend:
        options = config.router
        block_size = config.engine_for(config.active_pools[0]).block_size
        retries = RetryBudget(options.max_concurrent_requests)
        return Frontend(
            model_name=config.served_model_name or model_name,
            tokenizer=tokenizer,
            registry=self.registry,
            pipeline=Pipeline(
                placer, self._turnstile, retries, metrics, block_size, options.max_attempts, waits
            ),
            admission=self.admission,
            metrics=metrics,
            block_size=block_size,
            reading=ChatReading.of(
                tokenizer.chat_template, options.tool_parser, options.reasoning_parser
            ),
            timelines=Timelines(on_end=self._tracer.export if self._tracer is not None else None),
        )

    async def start(self) -> None:
        self.registry.start()
        report = report_queue(self._controller, self._turnstile.waiting)
        self._reporting = asyncio.create_task(report, name="report the queue")
        if self._share is not None:
            await self._wait_to_join()
        await self._grpc.start()
        self._tasks = [
            asyncio.create_task(self._http.serve_on(self._listener), name="http"),
            asyncio.create_task(self._publish_health(), name="health"),
        ]
        if self._own_http is not None and self._share is not None:
            own = self._own_http.serve_on(listen_locally(self._share.socket_path))
            self._tasks.append(asyncio.create_task(own, name="http of this process"))

    async def _wait_to_join(self) -> None:
        """A process beside others takes no connection before it can serve one, for a while: the
        others may be able to."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _JOIN_S
        while not self.registry.can_serve() and (left := deadline - loop.time()) > 0:
            await self.registry.wait_for_change(left)

    async def close(self, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """Refuses new work, gives running streams `grace_s`, ends the others with an error."""
        http, health, *own = self._tasks
        # Stops listening; open responses go on, and past the grace end by themselves.
        self._http.config.timeout_graceful_shutdown = round(grace_s) + 2
        self._http.should_exit = True
        if self._own_http is not None:
            self._own_http.config.timeout_graceful_shutdown = 1
            self._own_http.should_exit = True
        await self._health.enter_graceful_shutdown()
        await self.admission.close(grace_s)
        await self._turnstile.close()
        await self._grpc.stop(1.0)
        await asyncio.gather(http, *own)
        background = [health] + ([self._reporting] if self._reporting is not None else [])
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.registry.close()
        for file in (self._usage, self._tally):
            if file is not None:
                file.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _publish_health(self) -> None:
        """Keeps the gRPC health service in step with /ready."""
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", serving)
        while True:
            ready = self.registry.can_serve()
            await self._health.set(SERVICE, serving if ready else not_serving)
            await self.registry.wait_for_change(_HEALTH_INTERVAL_S)


def _tls_of(config: Config) -> TlsFiles | None:
    """Raises ConfigError if a file cannot be used."""
    if config.router.tls is None:
        return None
    files = TlsFiles(config.router.tls.cert_file, config.router.tls.key_file)
    files.check("router.tls")
    return files
