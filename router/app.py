"""The HTTP application: routes, errors and what surrounds every request."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.config import Config
from core.errors import PdserveError
from router.access.api_keys import KeyStore
from router.access.caller import Caller
from router.cluster_view import cluster_view
from router.dashboard import dashboard_routes
from router.debug_routes import debug_routes
from router.http.errors import as_pdserve_error, error_response, install_error_handlers
from router.http.responses import SERVER_SEND
from router.openai.embeddings import embedding_routes
from router.openai.frontend import Frontend
from router.openai.routes import openai_routes
from router.openai.tokenize_routes import tokenize_routes
from router.processes.share import Share, merged_metrics
from router.request.metrics import SEEN_BY_ALL

Endpoint = Callable[[Request], Awaitable[Response]]

OPEN_PATHS = frozenset({"/health", "/ready"})


def make_app(
    frontend: Frontend,
    config: Config,
    keys: KeyStore | None = None,
    share: Share | None = None,
) -> ASGIApp:
    """`keys`: None lets everybody in. `share`: with other processes, whose part is asked for."""
    # A path with a slash too many is an unknown one: a redirect would be no answer of OpenAI's.
    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    posts: dict[str, Endpoint] = {}
    for router in (
        openai_routes(frontend, config.router.max_body_bytes),
        embedding_routes(frontend, config.router),
        tokenize_routes(frontend, config.router.max_body_bytes),
    ):
        app.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute) and route.methods == {"POST"}:
                posts[route.path] = route.endpoint
    app.include_router(debug_routes(frontend.timelines, share))
    app.include_router(dashboard_routes(frontend, config.mode, share))

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

    return Edge(app, keys, posts)


class Edge:
    """What every request passes first. Says who calls, for everything behind it: the client's own
    request id or a fresh one, which the `x-request-id` header gives back, and the account of its
    API key. Whatever is not in `OPEN_PATHS`, to the letter, needs a key if keys are configured:
    routes that are added later, and routes that do not exist. A request counts against its key
    until its response has ended.

    `posts`, endpoints by path, are also routes of `app`, which documents them. They are called from
    here: a dozen layers of the application in between do nothing for them, and each costs time for
    every request and memory for every open stream.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore | None, posts: Mapping[str, Endpoint]) -> None:
        self.app = app
        self._keys = keys
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        session = headers.get("x-session-id", "")
        given = headers.get("x-request-id", ""), headers.get("traceparent", "")
        caller = Caller.of(*given, session=session)
        tag = (b"x-request-id", caller.request_id.encode("ascii"))

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), tag]
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
            scope[SERVER_SEND] = send
            endpoint = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
            if endpoint is None:
                await self.app(scope, receive, tagged)
            else:
                await _answer(endpoint, scope, receive, tagged)


async def _answer(endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        response = await endpoint(Request(scope, receive))
    except Exception as error:
        response = error_response(as_pdserve_error(error))
    await response(scope, receive, send)
