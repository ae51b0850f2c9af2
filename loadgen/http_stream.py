"""One POST on a connection of its own, and the answer's body as it arrives.

Own code, because the client must not be what is measured: a general HTTP client took five to ten
times as long between the connect and the first byte, and three times the CPU for each token.
HTTP/1.1 with `Connection: close`, with or without TLS; no proxies, no redirects, no compression.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from core.errors import ConfigError

_MAX_HEAD = 64 << 10
_READ = 64 << 10


class ProtocolError(ValueError):
    """The answer is not HTTP/1.1, or ended in the middle."""


class ConnectFailed(OSError):
    """Nobody took the connection."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where to, taken apart once."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    host_header: str

    @classmethod
    def from_url(cls, url: str) -> "HttpTarget":
        """Raises ConfigError for what is no http(s) URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url}: expected a URL like http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        host_header = parts.netloc.rpartition("@")[2]
        return cls(parts.hostname, port, parts.path or "/", tls, host_header)


@dataclass(slots=True)
class HttpAnswer:
    """A status, and the body in pieces as they come."""

    status: int
    headers: dict[str, str]  # names in lower case
    _reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises ProtocolError if the body ends before it is complete."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            decoder = ChunkedDecoder()
            while not decoder.is_done:
                data = await self._reader.read(_READ)
                if not data:
                    raise ProtocolError("the connection closed within the answer")
                if body := decoder.feed(data):
                    yield body
            return
        length = self.headers.get("content-length")
        left = int(length) if length is not None else None
        while left is None or left > 0:
            data = await self._reader.read(_READ)
            if not data:
                if left is None:
                    return
                raise ProtocolError("the connection closed within the answer")
            left = left - len(data) if left is not None else None
            yield data

    async def text(self, limit: int = 4096) -> str:
        """The beginning of the body."""
        found = b""
        async for piece in self.pieces():
            found += piece
            if len(found) >= limit:
                break
        return found[:limit].decode("utf-8", "replace")


@asynccontextmanager
async def post(
    target: HttpTarget, headers: dict[str, str], body: bytes
) -> AsyncIterator[HttpAnswer]:
    """The answer's head has arrived when this enters; the connection ends with the block.
    Raises ConnectFailed, ProtocolError, or an OSError for a lost connection."""
    try:
        reader, writer = await asyncio.open_connection(
            target.host, target.port, ssl=target.tls, limit=_MAX_HEAD
        )
    except OSError as error:
        raise ConnectFailed(str(error)) from error
    try:
        head = [f"POST {target.path} HTTP/1.1", f"host: {target.host_header}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        head += [f"content-length: {len(body)}", "accept-encoding: identity", "connection: close"]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        status, answered = await _read_head(reader)
        yield HttpAnswer(status, answered, reader)
    finally:
        # At once and without a goodbye: an interrupted stream must end at the server too.
        writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    while True:
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise ProtocolError("the connection closed before an answer") from error
        except asyncio.LimitOverrunError as error:
            raise ProtocolError("the head of the answer is too long") from error
        first, *lines = raw.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 answer: {first[:80]!r}")
        if int(parts[1]) >= 200:  # 1xx only announces
            pairs = (line.partition(":") for line in lines if line)
            return int(parts[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


class ChunkedDecoder:
    """Body bytes out of a chunked transfer coding, whatever the pieces are cut like."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # of the chunk, its line end included
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """Raises ProtocolError. What follows the last chunk is ignored."""
        data = self._buffer + data
        self._buffer = b""
        found = []
        while data and not self.is_done:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                # The last two bytes of a chunk are its line end.
                cut = max(0, 2 - self._left)
                found.append(piece[: len(piece) - cut] if cut else piece)
                continue
            line, end, rest = data.partition(b"\r\n")
            if not end:
                if len(data) > 1024:
                    raise ProtocolError("a chunk without a size")
                self._buffer = data
                break
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"not a chunk size: {line[:40]!r}") from None
            data = rest
            if size <= 0:
                self.is_done = True
            else:
                self._left = size + 2
        return b"".join(found)
