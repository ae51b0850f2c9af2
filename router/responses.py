"""Responses that end when their client does.

The status line is sent with the first event, so that whatever fails before it has its own status.
While a response is worked on, a second task waits for the client to leave, and its leaving
cancels the work, whether or not anything was sent yet.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from core.errors import PdserveError
from router.errors import as_pdserve_error, error_event, error_response

# A client that takes nothing for so long is gone: it holds KV blocks on a worker.
SEND_TIMEOUT_S = 60.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Sends a whole response and says how it went: ok or error.
Work = Callable[[Scope, Receive, Send], Awaitable[str]]


class GuardedResponse(Response):
    """Runs `work` until it ends or the client leaves. `outcome` hears once how it ended: ok,
    error or cancelled."""

    def __init__(self, work: Work, outcome: Callable[[str], None]) -> None:
        super().__init__()
        self._work = work
        self._outcome = outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.create_task(_client_left(receive))
        outcome = "cancelled"
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not work.cancelled():
                outcome = work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._outcome(outcome)


def whole(body: Callable[[], Awaitable[dict[str, Any] | Response]]) -> Work:
    """A JSON body, or a response, that is ready only when the generation has ended."""

    async def work(scope: Scope, receive: Receive, send: Send) -> str:
        response: Response
        try:
            made, outcome = await body(), "ok"
            response = made if isinstance(made, Response) else JSONResponse(made)
        except Exception as error:
            response, outcome = error_response(as_pdserve_error(error)), "error"
        await response(scope, receive, send)
        return outcome

    return work


def event_stream(
    make_events: Callable[[], AsyncGenerator[bytes, None]],
    failure: Callable[[PdserveError], bytes] = error_event,
) -> Work:
    """Server-sent events. A failure after the first is an event of its own, which `failure`
    makes, and then the stream closes without `[DONE]`."""

    async def work(scope: Scope, receive: Receive, send: Send) -> str:
        has_started = False
        outcome = "ok"

        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with aclosing(make_events()) as events:
                async for event in events:
                    if not event:
                        continue
                    if not has_started:
                        has_started = True
                        start = {"type": "http.response.start", "status": 200}
                        await send({**start, "headers": _STREAM_HEADERS})
                    await write(event)
        except Exception as error:
            known = as_pdserve_error(error)
            outcome = "error"
            if not has_started:
                await error_response(known)(scope, receive, send)
                return outcome
            await write(failure(known))
        await write(b"", more=False)
        return outcome

    return work


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
