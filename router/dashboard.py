"""`/dashboard`: one page without a build step or a foreign request, live over server-sent events.

The page holds no data: it draws what `/dashboard/events` sends and what `/debug/requests/{id}`
answers. Its Content-Security-Policy names the hashes of its own script and style and allows
nothing else.
"""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse, Response

from core.errors import OverloadedError
from router.cluster_view import cluster_view
from router.http.responses import GuardedResponse, event_stream
from router.openai.frontend import Frontend
from router.processes.share import Share
from router.request.timeline import MAX_TIMELINES, EventLog, Timeline
from router.request.timeline_view import timeline_summary

MAX_CLIENTS = 16
INTERVAL_S = 0.5
_WINDOW_S = 10.0  # that the charts' percentiles are of
_NUM_RECENT = 40
_GAPS_OF_ONE = 64  # latest gaps of one sequence that count for itl
_MAX_VALUES = 1024  # of one kind, that a process tells another
_MAX_EVENTS = 64  # of one message; a page that shows more at once shows nothing


def dashboard_routes(frontend: Frontend, mode: str, share: Share | None = None) -> APIRouter:
    """`share`: with other processes, whose requests are shown too."""
    router = APIRouter()
    page = (Path(__file__).parent / "dashboard.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_security_policy(page),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    feed = Feed(frontend, mode, share)

    @router.get("/dashboard")
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @router.get("/dashboard/events")
    async def events() -> Response:
        if feed.is_full:
            raise OverloadedError(f"{MAX_CLIENTS} dashboards are open already")
        return GuardedResponse(event_stream(lambda _: feed.events()), lambda outcome: None)

    @router.get("/dashboard/part", include_in_schema=False)
    async def part(since: int = -1) -> JSONResponse:
        """What this process adds to a page that another one sends."""
        return JSONResponse(part_of(frontend, since))

    return router


def content_security_policy(page: str) -> str:
    """Allows the page's own inline script and style, by their hashes, and calls to this host."""

    def sources(tag: str) -> str:
        bodies = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = (b64encode(sha256(body.encode()).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{value}'" for value in hashes)

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def part_of(frontend: Frontend, since: int) -> dict[str, Any]:
    """What is of one process, with its events after the one numbered `since`; -1: none."""
    workers = frontend.registry.workers
    log = frontend.timelines.events
    recent = frontend.timelines.recent(_NUM_RECENT)
    return {
        "in_flight": frontend.admission.in_flight,
        "attempts": {worker.id: worker.num_passengers for worker in workers.values()},
        "requests": [timeline_summary(timeline) for timeline in recent],
        "window": _window(frontend.timelines.recent(MAX_TIMELINES)),
        "events": [dict(event) for event in log.since(since)[-_MAX_EVENTS:]] if since >= 0 else [],
        "last_event": log.last,
    }


class Feed:
    """What the open pages are told, twice a second. Looks at the router once for all of them, and
    asks its other processes, if there are any."""

    def __init__(self, frontend: Frontend, mode: str, share: Share | None = None) -> None:
        self._frontend = frontend
        self._mode = mode
        self._share = share
        self._num_clients = 0
        self._snapshot: dict[str, Any] = {}
        self._taken = float("-inf")
        self._looking = asyncio.Lock()
        self._log = EventLog()  # of all processes
        self._heard: dict[int, int] = {}  # by process: its last event that is in the log

    @property
    def is_full(self) -> bool:
        return self._num_clients >= MAX_CLIENTS

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Ends when the router stops."""
        if not self._num_clients:
            self._heard.clear()  # what happened while nobody looked is not shown
        self._num_clients += 1
        seen = self._log.last
        try:
            while not self._frontend.admission.is_closing:
                snapshot = await self.snapshot()
                fresh = self._log.since(seen)[-_MAX_EVENTS:]
                seen = self._log.last
                message = json.dumps({**snapshot, "events": fresh})
                yield f"data: {message}\n\n".encode()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._num_clients -= 1

    async def snapshot(self) -> dict[str, Any]:
        async with self._looking:
            now = monotonic()
            if now - self._taken >= INTERVAL_S / 2:
                self._taken = now
                self._snapshot = self._joined(await self._parts())
        return self._snapshot

    async def _parts(self) -> list[dict[str, Any]]:
        """One for each process; from each, what happened since the last time."""
        own = self._share.index if self._share is not None else 0
        parts = {own: part_of(self._frontend, self._heard.get(own, -1))}
        if self._share is not None:
            answers = await self._share.ask_each(
                lambda index: f"/dashboard/part?since={self._heard.get(index, -1)}"
            )
            parts |= {i: answer.json() for i, answer in answers.items() if answer.is_success}
        for index, part in parts.items():
            for event in part["events"]:
                del event["number"]  # its own; here it gets another one
                self._log.add(event.pop("kind"), event.pop("id"), **event)
            self._heard[index] = part["last_event"]
        return list(parts.values())

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        frontend = self._frontend
        cluster = cluster_view(frontend.registry, self._mode, frontend.model_name)
        for worker in cluster["workers"]:
            # A page needs no addresses, and the less it shows the better.
            for name in ("host", "pid", "address", "incarnation", "detail"):
                worker.pop(name, None)
            there = sum(part["attempts"].get(worker["id"], 0) for part in parts)
            worker["attempts_in_flight"] = there
        requests = [request for part in parts for request in part["requests"]]
        windows = [part["window"] for part in parts]
        num_tokens = sum(window["tokens"] for window in windows)
        return {
            **cluster,
            "is_chat": frontend.tokenizer.chat_template is not None,
            "in_flight": sum(part["in_flight"] for part in parts),
            "window": {
                **{
                    name: _percentiles([one for window in windows for one in window[name]])
                    for name in ("ttft", "tpot", "itl")
                },
                "tokens_per_second": round(num_tokens / _WINDOW_S, 1),
            },
            "requests": sorted(requests, key=lambda one: one["age_seconds"])[:_NUM_RECENT],
        }


def _window(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Latencies of the last seconds, and how many tokens came."""
    now = monotonic()
    ttfts, tpots, gaps, num_tokens = [], [], [], 0
    for timeline in timelines:
        since = now - timeline.received - _WINDOW_S  # in the timeline's own seconds
        for sequence in timeline.sequences:
            if sequence.last_token is None or sequence.last_token < since:
                continue
            if sequence.first_token is not None and sequence.first_token >= since:
                ttfts.append(sequence.first_token)
            if sequence.finished is not None and sequence.tpot is not None:
                tpots.append(sequence.tpot)
            times = [t for t in sequence.token_times[-_GAPS_OF_ONE:] if t >= since]
            gaps += [after - before for before, after in pairwise(times) if after > before]
            num_tokens += len(times)
    return {"ttft": _some(ttfts), "tpot": _some(tpots), "itl": _some(gaps), "tokens": num_tokens}


def _some(values: list[float]) -> list[float]:
    """So many, evenly chosen, tell as much."""
    return values[:: len(values) // _MAX_VALUES + 1]


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[round(last * p / 100)], 6) for p in (50, 95)}
