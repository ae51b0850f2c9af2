"""The client of `benchmarks/router.py`: streams over plain sockets, so that it costs little.

A connection for each of the concurrent streams; each sends one request after the other. What is
noted is when a token's text arrived, and under which x-request-id it was asked for.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field

_TEXT = re.compile(rb'"(?:text|content)": ?"([^"]*)"')


@dataclass(slots=True)
class Request:
    """`started`, `ended` and `arrived` (one entry a token) in seconds of the monotonic clock."""

    id: str
    started: float
    ended: float = 0.0
    arrived: list[float] = field(default_factory=list)
    num_writes: int = 0  # pieces in which the body came


class Stream(asyncio.Protocol):
    """One connection; one request at a time, which ends with the body's last chunk."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.opened = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.opened.set_result(None)

    async def send(self, request: Request, body: bytes) -> None:
        self.request, self._rest = request, b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(  # type: ignore[attr-defined]
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (request.id.encode(), len(body), body)
        )
        await self._ended

    def data_received(self, data: bytes) -> None:
        request, now = self.request, time.monotonic()
        assert request is not None and self._ended is not None
        request.num_writes += 1
        data = self._rest + data
        whole, newline, self._rest = data.rpartition(b"\n")
        for text in _TEXT.findall(whole + newline):
            request.arrived += [now] * len(text)
        if self._rest == b"" and data.endswith(b"0\r\n\r\n"):
            request.ended = now
            if not request.arrived:
                raise RuntimeError(f"no token came: {data[:400]!r}")
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError("the router closed the connection"))

    def close(self) -> None:
        self._transport.close()


async def load(
    host: str, port: int, model: str, num_streams: int, num_requests: int, num_tokens: int,
    tag: str, spread_s: float,
) -> list[Request]:  # fmt: skip
    """Runs `num_requests` with `num_streams` at once, which begin within `spread_s`."""
    body = json.dumps(
        {
            "model": model, "prompt": "Why is the sky blue?", "max_tokens": num_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }
    ).encode()  # fmt: skip
    left = iter(range(num_requests))
    requests: list[Request] = []
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(num_streams):
        _, stream = await loop.create_connection(Stream, host, port)
        streams.append(stream)

    async def run(stream: Stream, position: int) -> None:
        await asyncio.sleep(spread_s * position / num_streams)
        for number in left:
            request = Request(f"{tag}-{number}", time.monotonic())
            requests.append(request)
            await stream.send(request, body)

    try:
        await asyncio.gather(*map(run, streams, range(num_streams)))
    finally:
        for stream in streams:
            stream.close()
    return requests
