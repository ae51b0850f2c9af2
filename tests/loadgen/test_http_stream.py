"""HTTP/1.1 answers in all their shapes."""

import asyncio
import contextlib

import pytest

from core.errors import ConfigError
from loadgen.http_stream import ChunkedDecoder, ConnectFailed, HttpTarget, ProtocolError, post

NEWLINES = b"\r\n" * 5  # ten bytes that look like framing
CHUNKED = b"5\r\nhello\r\n7;ext=1\r\n, world\r\nA\r\n" + NEWLINES + b"\r\n0\r\nx: y\r\n\r\n"
DECODED = b"hello, world" + NEWLINES


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_chunks_are_decoded_however_they_are_cut(size):
    decoder = ChunkedDecoder()
    pieces = [CHUNKED[i : i + size] for i in range(0, len(CHUNKED), size)]
    assert b"".join(decoder.feed(piece) for piece in pieces) == DECODED
    assert decoder.is_done


def test_chunks_are_decoded_cut_at_any_one_place():
    for cut in range(len(CHUNKED)):
        decoder = ChunkedDecoder()
        assert decoder.feed(CHUNKED[:cut]) + decoder.feed(CHUNKED[cut:]) == DECODED
        assert decoder.is_done


@pytest.mark.parametrize("data", [b"zz\r\nhello", b"\r\n", b"a" * 2000])
def test_what_is_no_chunk_is_an_error(data):
    with pytest.raises(ProtocolError):
        ChunkedDecoder().feed(data)


@contextlib.asynccontextmanager
async def answering(raw: bytes):
    """A server that sends `raw` and closes; yields its target and what it received."""
    received: list[bytes] = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        received.append(head + await reader.readexactly(2))
        writer.write(raw)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield HttpTarget.from_url(f"http://127.0.0.1:{port}/v1/x"), received


async def fetch(raw: bytes) -> tuple[int, bytes]:
    async with answering(raw) as (target, _), post(target, {}, b"{}") as answer:
        return answer.status, b"".join([piece async for piece in answer.pieces()])


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED, DECODED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", b"body"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.0 200\r\n\r\nold", b"old"),
    ],
)
async def test_bodies_of_every_framing(raw, body):
    assert await fetch(raw) == (200, body)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"SSH-2.0 hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_not_a_whole_answer_is_an_error(raw):
    with pytest.raises((ProtocolError, ConnectionError)):
        await fetch(raw)


async def test_the_request_is_whole():
    raw = b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"
    async with (
        answering(raw) as (target, received),
        post(target, {"authorization": "Bearer k"}, b"{}") as answer,
    ):
        assert answer.status == 503
        assert await answer.text() == "no"
    (request,) = received
    assert request.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer k\r\n" in request
    assert b"\r\ncontent-length: 2\r\n" in request and request.endswith(b"\r\n\r\n{}")


async def test_nobody_there_is_its_own_error():
    with pytest.raises(ConnectFailed):
        async with post(HttpTarget.from_url("http://127.0.0.1:1/"), {}, b""):
            pass


def test_urls_are_taken_apart():
    target = HttpTarget.from_url("http://[::1]:80/a")
    assert (target.host, target.port, target.path, target.tls) == ("::1", 80, "/a", None)
    secure = HttpTarget.from_url("https://example.org")
    assert (secure.port, secure.path) == (443, "/") and secure.tls is not None
    for wrong in ("ftp://x", "http://", "http://h:port"):
        with pytest.raises(ConfigError):
            HttpTarget.from_url(wrong)
