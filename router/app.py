"""The HTTP application: routes, errors and what surrounds every request."""

import re
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.config import Config
from router.cluster_view import cluster_view
from router.errors import install_error_handlers
from router.frontend import Frontend
from router.openai_routes import openai_routes

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(frontend: Frontend, config: Config) -> FastAPI:
    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.include_router(openai_routes(frontend, config.router.max_body_bytes))

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
        return Response(frontend.metrics.render(), media_type=frontend.metrics.content_type)

    @app.get("/cluster")
    async def cluster() -> JSONResponse:
        return JSONResponse(cluster_view(frontend.registry, config.mode, frontend.model_name))

    app.add_middleware(RequestIdMiddleware)
    return app


class RequestIdMiddleware:
    """Gives every request an id for logs and the `x-request-id` header: the client's own, or a
    fresh one. It never becomes an id inside the cluster."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, tagged)
