"""`/debug/requests`: the timelines of the last requests. Ids and times, never text."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from core.errors import NotFoundError, RequestError
from router.timeline import MAX_TIMELINES, Timelines
from router.timeline_view import timeline_summary, timeline_view

_DEFAULT_LIMIT = 50


def debug_routes(timelines: Timelines) -> APIRouter:
    router = APIRouter(prefix="/debug")

    @router.get("/requests")
    async def requests(limit: int = _DEFAULT_LIMIT) -> JSONResponse:
        if not 1 <= limit <= MAX_TIMELINES:
            raise RequestError(f"limit goes from 1 to {MAX_TIMELINES}", param="limit")
        return JSONResponse({"requests": [timeline_summary(t) for t in timelines.recent(limit)]})

    @router.get("/requests/{name:path}")
    async def request(name: str) -> JSONResponse:
        timeline = timelines.find(name)
        if timeline is None:
            raise NotFoundError(
                f"no request {name[:128]!r} among the last {MAX_TIMELINES}: its x-request-id or "
                "the id of its response is wanted",
                code="not_found",
            )
        return JSONResponse(timeline_view(timeline))

    return router
