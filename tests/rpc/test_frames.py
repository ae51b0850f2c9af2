"""The connection that a step's tokens come on: who gets in, what it survives, what it leaves."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from core.errors import StalePeerError
from router.placement.step_stream import StepReader
from rpc import frames
from rpc import worker_pb2 as pb
from rpc.cluster_token import VARIABLE
from rpc.frames import MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, FrameConnection, connect
from rpc.tls import TlsFiles
from support.certificates import Authority
from support.waiting import eventually
from worker import step_stream
from worker.step_stream import StepStream, StepStreams

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def check(incarnation: str) -> None:
    if incarnation != "life":
        raise StalePeerError("another life")


@asynccontextmanager
async def worker() -> AsyncIterator[tuple[StepStreams, str]]:
    streams = StepStreams(check)
    try:
        yield streams, await streams.listen("127.0.0.1")
    finally:
        await streams.close()
        assert not streams._open and not streams._connections


def hello(stream_id: str = "mine", incarnation: str = "life", token: str = "") -> bytes:
    message = pb.StepsHello(stream_id=stream_id, incarnation=incarnation, cluster_token=token)
    return message.SerializeToString()


class Router:
    """What a worker says to whom."""

    def __init__(self) -> None:
        self.heard: list[pb.StepTokens] = []

    async def call(self, address: str, greeting: bytes = hello()) -> FrameConnection:
        connection = await connect(
            address, lambda frame: self.heard.append(pb.StepTokens.FromString(frame))
        )
        connection.send(greeting)
        return connection


async def opened(streams: StepStreams, address: str) -> tuple[Router, FrameConnection, StepStream]:
    router = Router()
    connection = await router.call(address)
    await eventually(lambda: streams.get("mine"))
    stream = streams.get("mine")
    assert stream is not None
    return router, connection, stream


async def following(
    address: str, incarnation: str = "life"
) -> tuple[StepReader, "asyncio.Task[None]"]:
    reader = StepReader("decode-0", incarnation)
    return reader, asyncio.create_task(reader.follow(address))


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_tokens_arrive_whole_however_the_bytes_are_cut() -> None:
    """Many small messages in one piece, and one that is larger than any buffer on the way."""
    async with worker() as (streams, address):
        router, connection, stream = await opened(streams, address)
        for index in range(5000):
            stream.put_token("a", 1, index, index)
            stream.flush()
        big = pb.Tokens(first_index=5000, tokens=[pb.Token(id=7)] * 1_000_000)
        stream.put("a", big)
        await eventually(lambda: router.heard and router.heard[-1].sequences)
        assert [i for m in router.heard for i in m.indexes] == list(range(5000))
        assert len(router.heard[-1].sequences[0].tokens.tokens) == 1_000_000
        connection.close()
        await eventually(lambda: streams.get("mine") is None)
        assert not stream.is_open


async def test_a_router_that_does_not_read_costs_what_its_requests_say() -> None:
    """The socket takes some, the rest waits where it is bounded, and goes out in order."""
    async with worker() as (streams, address):
        router, connection, stream = await opened(streams, address)
        assert connection._transport is not None
        connection._transport.pause_reading()
        text = pb.Tokens(tokens=[pb.Token(id=1)] * 20_000)
        for index in range(1000):
            text.first_index = index
            stream.put("a", text)
            await asyncio.sleep(0)
        assert not stream._connection.is_free and len(stream._waiting) > 100
        connection._transport.resume_reading()
        await eventually(lambda: sum(len(m.sequences) for m in router.heard) == 1000, 60)
        found = [one.tokens.first_index for m in router.heard for one in m.sequences]
        assert found == list(range(1000)) and not stream._waiting
        connection.close()


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (hello(token="wrong"), "cluster token"),
        (hello(), "cluster token"),
        (hello(incarnation="earlier", token="right"), "another life"),
        (hello(stream_id="", token="right"), "an id"),
        (b"\xff\xff\xff", "no StepsHello"),
    ],
)
async def test_a_stranger_is_told_why_and_let_go(
    greeting: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "right")
    async with worker() as (streams, address):
        router = Router()
        connection = await router.call(address, greeting)
        async with asyncio.timeout(5):
            assert await connection.ended == "it ended"
        assert [reason in message.refusal for message in router.heard] == [True]
        assert not streams._open


async def test_what_is_no_hello_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_stream, "_HELLO_S", 0.05)
    async with worker() as (streams, address):
        host, _, port = address.rpartition(":")

        async def answer(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            try:
                async with asyncio.timeout(5):
                    return await reader.read()
            except ConnectionResetError:
                return b""
            finally:
                writer.close()

        too_long = (MAX_HELLO_BYTES + 1).to_bytes(4, "big")
        for data in (b"", b"\0\0", too_long, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"):
            assert await answer(data) == b""
        framed = len(hello()).to_bytes(4, "big") + hello()
        assert len(await answer(framed + framed)) <= 4  # a second one says too much
        await eventually(lambda: not streams._connections)
    assert f"at most {MAX_HELLO_BYTES}" in caplog.text


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stream, "_MAX_CONNECTIONS", 2)
    async with worker() as (streams, address):
        router = Router()
        connections = [await router.call(address, hello(name)) for name in ("a", "b")]
        await eventually(lambda: len(router.heard) == 2)
        async with asyncio.timeout(5):
            await (await router.call(address, hello("c"))).ended
        connections[0].close()
        await eventually(lambda: list(streams._open) == ["b"])
        connections[0] = await router.call(address, hello("c"))
        await eventually(lambda: list(streams._open) == ["b", "c"])
        for connection in connections:
            connection.close()


async def test_a_reader_survives_a_worker_that_talks_nonsense(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the connection up and tries again, and says so once, not every second."""
    monkeypatch.setattr("router.placement.step_stream._AGAIN_S", 0.01)
    answers = iter([(MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\2\xff\xff"])
    calls = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.write(next(answers, b""))
        if calls > 5:
            message = pb.StepTokens(refusal="not you").SerializeToString()
            writer.write(len(message).to_bytes(4, "big") + message)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with caplog.at_level(logging.WARNING, "router.placement.step_stream"):
            reader, task = await following(f"127.0.0.1:{port}")
            await eventually(lambda: calls > 8)
        await ended(task)
    assert not reader.stream_id
    said = [r for r in caplog.records if r.name == "router.placement.step_stream"]
    assert len(said) == 1 and "decode-0: the stream of tokens has broken" in caplog.text


async def test_where_nobody_answers_tokens_come_on_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A port that is closed, or one behind which nothing is said: no stream, and no more."""
    monkeypatch.setattr(frames, "_CONNECT_S", 0.05)
    reader, task = await following("127.0.0.1:1")
    await asyncio.sleep(0.1)
    assert not task.done() and not reader.stream_id
    await ended(task)


@needs_openssl
async def test_over_tls_only_with_a_certificate_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a fresh one as soon as it is there."""
    ours, theirs = Authority.make(tmp_path / "ours"), Authority.make(tmp_path / "theirs")
    good, stranger = ours.issue("part"), theirs.issue("part")

    def use(files: TlsFiles) -> None:
        for name in ("ca", "cert", "key"):
            monkeypatch.setenv(f"PDSERVE_TLS_{name.upper()}_FILE", getattr(files, f"{name}_file"))

    use(good)
    async with worker() as (streams, address):
        router = Router()
        connection = await router.call(address)
        await eventually(lambda: router.heard)
        connection.close()
        await eventually(lambda: not streams._open)
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))  # no TLS
        writer.write(len(hello()).to_bytes(4, "big") + hello())
        await reader.read()
        writer.close()
        use(stranger)
        with pytest.raises(OSError, match="(?i)certificate"):
            await router.call(address)
        use(TlsFiles(stranger.cert_file, stranger.key_file, good.ca_file))
        with suppress(OSError):  # with TLS 1.3 the client hears of it later
            await (await router.call(address)).ended
        assert not streams._open and len(router.heard) == 1
        use(good)
        renewed = ours.issue("part")  # in its place
        assert renewed == good
        connection = await router.call(address, hello("again"))
        await eventually(lambda: len(router.heard) == 2)
        assert list(streams._open) == ["again"]
        connection.close()
