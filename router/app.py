"""The HTTP application: routes, errors and what surrounds every request."""

from contextlib import ExitStack
from dataclasses import replace

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.config import Config
from core.errors import PdserveError
from router.api_keys import KeyStore
from router.caller import Caller
from router.cluster_view import cluster_view
from router.dashboard import dashboard_routes
from router.debug_routes import debug_routes
from router.embeddings import embedding_routes
from router.errors import error_response, install_error_handlers
from router.frontend import Frontend
from router.metrics import SEEN_BY_ALL
from router.openai_routes import openai_routes
from router.responses import SERVER_SEND
from router.share import Share, merged_metrics
from router.tokenize_routes import tokenize_routes

OPEN_PATHS = frozenset({"/health", "/ready"})


def make_app(
    frontend: Frontend,
    config: Config,
    keys: KeyStore | None = None,
    share: Share | None = None,
) -> FastAPI:
    """`keys`: None lets everybody in. `share`: with other processes, whose part is asked for."""
    app = _App(title="pdserve", docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.include_router(openai_routes(frontend, config.router.max_body_bytes))
    app.include_router(embedding_routes(frontend, config.router))
    app.include_router(tokenize_routes(frontend, config.router.max_body_bytes))
    app.include_router(debug_routes(frontend.timelines, share))
    app.include_router(dashboard_routes(frontend, config.mode))

    def is_ready() -> bool:
        return not frontend.admission.is_closing and frontend.registry.can_serve()

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> JSONResponse:
        if is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, {"retry-after": "1"})

    @app.get("/metrics")
    async def metrics() -> Response:
        own = frontend.metrics.render()
        if share is not None:
            texts = [own.decode(), *(answer.text for answer in await share.ask("/metrics"))]
            own = merged_metrics(texts, SEEN_BY_ALL)
        return Response(own, media_type=frontend.metrics.content_type)

    @app.get("/cluster")
    async def cluster() -> JSONResponse:
        return JSONResponse(cluster_view(frontend.registry, config.mode, frontend.model_name))

    app.add_middleware(CallerMiddleware, keys=keys)
    return app


class _App(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


class CallerMiddleware:
    """Says who calls, for everything behind it: the client's own request id or a fresh one, which
    the `x-request-id` header gives back, and the account of its API key. Whatever is not in
    `OPEN_PATHS`, to the letter, needs a key if keys are configured: routes that are added later,
    and routes that do not exist. A request counts against its key until its response has ended."""

    def __init__(self, app: ASGIApp, keys: KeyStore | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        session = headers.get("x-session-id", "")
        given = headers.get("x-request-id", ""), headers.get("traceparent", "")
        caller = Caller.of(*given, session=session)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = caller.request_id
            await send(message)

        with ExitStack() as counted:
            try:
                if self._keys is not None and scope["path"] not in OPEN_PATHS:
                    account = self._keys.account(headers.get("authorization"))
                    caller = replace(caller, account=account)
                    if scope["method"] == "POST":
                        counted.enter_context(account.request())
            except PdserveError as error:
                await error_response(error)(scope, receive, tagged)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, tagged)
