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
from router.direct import Direct
from router.http.errors import as_pdserve_error, error_event, error_response
from router.http.server import BodyWriter

# A client that takes nothing for so long is gone: it holds KV blocks on a worker.
SEND_TIMEOUT_S = 60.0
MERGE_S = 0.005
# In the scope: the server's own `send`, past the layers of the application around it.
SERVER_SEND = "pdserve.send"
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


class _EventWriter:
    """Writes the events of one response, in order. Those that come in one turn of the event loop,
    or within `MERGE_S` of the last write, go out together: a write costs more than an event, and a
    reader sees no difference. While the client takes nothing, `write` waits, and after
    `SEND_TIMEOUT_S` the task is cancelled in which this writer was made."""

    def __init__(self, body: BodyWriter) -> None:
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._buffer: list[bytes] = []
        self._written_at = 0.0  # when the last write began
        self._is_writing = False
        self._timer: asyncio.Handle | None = None
        self._waiting: asyncio.Task[None] | None = None  # a write that has to wait for the client
        self._watch = self._loop.call_later(SEND_TIMEOUT_S, self._look)

    async def write(self, event: bytes) -> None:
        if self._waiting is not None:
            await self._waiting
            self._waiting = None
        self.write_soon(event)

    @property
    def is_free(self) -> bool:
        """Whether `write` would not wait."""
        return self._waiting is None

    def write_soon(self, event: bytes) -> None:
        """As `write`, while `is_free`."""
        self._buffer.append(event)
        if self._timer is None:
            wait = self._written_at + MERGE_S - self._loop.time()
            if wait <= 0:
                self._timer = self._loop.call_soon(self._flush_buffer)
            else:
                self._timer = self._loop.call_later(wait, self._flush_buffer)

    async def close(self) -> None:
        """Writes what is left, and the end of the body."""
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting is not None:
            await self._waiting
        await self._flush()
        self._is_writing = True
        await self._body.end()
        self._is_writing = False

    def stop(self) -> None:
        """Nothing more is written."""
        for handle in (self._timer, self._watch, self._waiting):
            if handle is not None:
                handle.cancel()

    async def _flush(self) -> None:
        if not self._buffer:
            return
        data = b"".join(self._buffer)
        self._buffer.clear()
        self._written_at = self._loop.time()
        self._is_writing = True
        await self._body.write(data)
        self._is_writing = False

    def _flush_buffer(self) -> None:
        self._timer = None
        if self._body.write_at_once(b"".join(self._buffer)):
            self._buffer.clear()
            self._written_at = self._loop.time()
        else:
            self._waiting = self._loop.create_task(self._flush())

    def _look(self) -> None:
        late = self._loop.time() - self._written_at
        if self._is_writing and late >= SEND_TIMEOUT_S and self._owner is not None:
            self._owner.cancel()
        else:
            wait = SEND_TIMEOUT_S - late if self._is_writing else SEND_TIMEOUT_S
            self._watch = self._loop.call_later(wait, self._look)


def event_stream(
    make_events: Callable[[Direct[bytes]], AsyncGenerator[bytes, None]],
    failure: Callable[[PdserveError], bytes] = error_event,
) -> Work:
    """Server-sent events. A failure after the first is an event of its own, which `failure`
    makes, and then the stream closes without `[DONE]`. The generator may also put events, but
    never its first, into what it is given, while it is asked for the next one."""

    async def work(scope: Scope, receive: Receive, send: Send) -> str:
        writer: _EventWriter | None = None
        outcome = "ok"

        def take(event: bytes) -> None:
            if event and writer is not None:
                writer.write_soon(event)

        direct = Direct(lambda: writer is not None and writer.is_free, take)
        try:
            try:
                async with aclosing(make_events(direct)) as events:
                    async for event in events:
                        if not event:
                            continue
                        if writer is None:
                            start = {"type": "http.response.start", "status": 200}
                            await send({**start, "headers": _STREAM_HEADERS})
                            body = BodyWriter(scope, scope.get(SERVER_SEND, send))
                            writer = _EventWriter(body)
                        await writer.write(event)
            except Exception as error:
                known = as_pdserve_error(error)
                outcome = "error"
                if writer is None:
                    await error_response(known)(scope, receive, send)
                    return outcome
                await writer.write(failure(known))
            if writer is not None:
                await writer.close()
        finally:
            if writer is not None:
                writer.stop()
        return outcome

    return work


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
