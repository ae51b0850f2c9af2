"""`/debug/requests`: the timelines of the last requests. Ids and times, never text."""

from urllib.parse import quote

from fastapi import APIRouter
from starlette.responses import JSONResponse

from core.errors import NotFoundError, RequestError
from router.processes.share import Share
from router.request.timeline import MAX_TIMELINES, Timelines
from router.request.timeline_view import timeline_summary, timeline_view

_DEFAULT_LIMIT = 50


def debug_routes(timelines: Timelines, share: Share | None = None) -> APIRouter:
    """`share`: with other processes, whose requests are shown too."""
    router = APIRouter(prefix="/debug")

    @router.get("/requests")
    async def requests(limit: int = _DEFAULT_LIMIT) -> JSONResponse:
        if not 1 <= limit <= MAX_TIMELINES:
            raise RequestError(f"limit goes from 1 to {MAX_TIMELINES}", param="limit")
        found = [timeline_summary(t) for t in timelines.recent(limit)]
        if share is not None:
            for answer in await share.ask(f"/debug/requests?limit={limit}"):
                found += answer.json()["requests"]
            found = sorted(found, key=lambda one: one["age_seconds"])[:limit]
        return JSONResponse({"requests": found})

    @router.get("/requests/{name:path}")
    async def request(name: str) -> JSONResponse:
        timeline = timelines.find(name)
        if timeline is None and share is not None:
            for answer in await share.ask(f"/debug/requests/{quote(name)}"):
                if answer.status_code == 200:
                    return JSONResponse(answer.json())
        if timeline is None:
            raise NotFoundError(
                f"no request {name[:128]!r} among the last {MAX_TIMELINES}: its x-request-id or "
                "the id of its response is wanted",
                code="not_found",
            )
        return JSONResponse(timeline_view(timeline))

    return router
