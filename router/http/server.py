"""uvicorn, held the way this router needs it."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import h11
import uvicorn
from starlette.types import ASGIApp, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from core.errors import ConfigError
from rpc.tls import TlsFiles

logger = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75
_REFUSAL_S = 1.0
HEAD_TIMEOUT_S = 20.0
_REASONS = {400: b"Bad Request", 408: b"Request Timeout"}
REREAD_S = 2.0  # from one look at the certificates to the next


class _Protocol(H11Protocol):
    """h11 bounds the size of the headers; here they have `HEAD_TIMEOUT_S`, from the connection or
    their first byte on. What is refused gets an OpenAI error body, and a moment to read it: closing
    on unread bytes would reset the connection and lose the answer."""

    _is_refused = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._head_timer is None and not self._has_request:
            self._wait_for_head()
        super().data_received(data)
        if self._has_request:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _has_request(self) -> bool:
        """Whether one is being answered, or its body still read, which has a limit of its own."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408, "the request's headers did not arrive in time")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, msg: str) -> None:
        self._is_refused = True
        self._stop_waiting()
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=_REASONS[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(_REFUSAL_S, self.transport.close)


class BodyWriter:
    """Pieces of a response's body, from its started state to its end, straight to the connection.
    A stream has thousands, and each costs more in the layers of the application and in h11, which
    none looks at them, than all else that happens to it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        """`send`: the server's own. Another one, of a test, and a client of HTTP/1.0, which knows
        no chunks, get their pieces through it."""
        cycle = getattr(send, "__self__", None)
        is_chunked = isinstance(cycle, RequestResponseCycle) and scope["http_version"] == "1.1"
        self._cycle = cycle if is_chunked else None
        self._send = send

    def write_at_once(self, data: bytes) -> bool:
        """False, and nothing has happened, if `write` has to be used."""
        cycle = self._cycle
        if cycle is None or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def write(self, data: bytes) -> None:
        """Waits while the client takes nothing. Nothing happens if it has left."""
        cycle = self._cycle
        if cycle is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            return
        while not self.write_at_once(data) and not cycle.disconnected:
            await cycle.flow.drain()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class HttpServer(uvicorn.Server):
    """One uvicorn server on sockets that are bound already. Signals belong to the process."""

    def __init__(self, app: ASGIApp, tls: TlsFiles | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_S,
                ssl_certfile=tls.cert_file if tls is not None else None,
                ssl_keyfile=tls.key_file if tls is not None else None,
            )
        )
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve_on(self, listener: socket) -> None:
        """Serves until `should_exit` is set and open responses have ended."""
        watch = asyncio.create_task(self._reread_certificates(), name="certificates")
        try:
            await self.serve(sockets=[listener])
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _reread_certificates(self) -> None:
        """Connections that are made after a change of the files see the new ones."""
        files = self._tls
        if files is None:
            return
        version = files.version()
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                now = files.version()
                if now == version or self.config.ssl is None:
                    continue
                version = now
                files.check("router.tls")
                self.config.ssl.load_cert_chain(files.cert_file, files.key_file)
                logger.info("certificates have changed: %s", files.cert_file)
            except (OSError, ConfigError) as error:
                logger.error("the last good certificates stand: %s", error)
