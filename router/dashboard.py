"""`/dashboard`: one page without a build step or a foreign request, live over server-sent events.

The page holds no data: it draws what `/dashboard/events` sends and what `/debug/requests/{id}`
answers. Its Content-Security-Policy names the hashes of its own script and style and allows
nothing else.
"""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncGenerator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from core.errors import OverloadedError
from router.cluster_view import cluster_view
from router.frontend import Frontend
from router.responses import GuardedResponse, event_stream
from router.timeline import MAX_TIMELINES
from router.timeline_view import timeline_summary

MAX_CLIENTS = 16
INTERVAL_S = 0.5
_WINDOW_S = 10.0  # that the charts' percentiles are of
_NUM_RECENT = 40
_GAPS_OF_ONE = 64  # latest gaps of one sequence that count for itl
_MAX_EVENTS = 64  # of one message; a page that shows more at once shows nothing


def dashboard_routes(frontend: Frontend, mode: str) -> APIRouter:
    router = APIRouter()
    page = (Path(__file__).parent / "dashboard.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_security_policy(page),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    feed = Feed(frontend, mode)

    @router.get("/dashboard")
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @router.get("/dashboard/events")
    async def events() -> Response:
        if feed.is_full:
            raise OverloadedError(f"{MAX_CLIENTS} dashboards are open already")
        return GuardedResponse(event_stream(feed.events), lambda outcome: None)

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


class Feed:
    """What the open pages are told, twice a second. Looks at the router once for all of them."""

    def __init__(self, frontend: Frontend, mode: str) -> None:
        self._frontend = frontend
        self._mode = mode
        self._num_clients = 0
        self._snapshot: dict[str, Any] = {}
        self._taken = float("-inf")

    @property
    def is_full(self) -> bool:
        return self._num_clients >= MAX_CLIENTS

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Ends when the router stops."""
        frontend = self._frontend
        log = frontend.timelines.events
        seen = log.last
        self._num_clients += 1
        try:
            while not frontend.admission.is_closing:
                fresh = log.since(seen)[-_MAX_EVENTS:]
                seen = log.last
                message = json.dumps({**self.snapshot(), "events": fresh})
                yield f"data: {message}\n\n".encode()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._num_clients -= 1

    def snapshot(self) -> dict[str, Any]:
        now = monotonic()
        if now - self._taken >= INTERVAL_S / 2:
            self._taken = now
            frontend = self._frontend
            cluster = cluster_view(frontend.registry, self._mode, frontend.model_name)
            for worker in cluster["workers"]:
                # A page needs no addresses, and the less it shows the better.
                for name in ("host", "pid", "address", "incarnation", "detail"):
                    worker.pop(name, None)
            recent = frontend.timelines.recent(_NUM_RECENT)
            self._snapshot = {
                **cluster,
                "is_chat": frontend.tokenizer.chat_template is not None,
                "in_flight": frontend.admission.in_flight,
                "window": self._window(),
                "requests": [timeline_summary(timeline) for timeline in recent],
            }
        return self._snapshot

    def _window(self) -> dict[str, Any]:
        """Latencies and throughput of the last seconds."""
        now = monotonic()
        ttfts, tpots, gaps, num_tokens = [], [], [], 0
        for timeline in self._frontend.timelines.recent(MAX_TIMELINES):
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
        return {
            "ttft": _percentiles(ttfts),
            "tpot": _percentiles(tpots),
            "itl": _percentiles(gaps),
            "tokens_per_second": round(num_tokens / _WINDOW_S, 1),
        }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[round(last * p / 100)], 6) for p in (50, 95)}
