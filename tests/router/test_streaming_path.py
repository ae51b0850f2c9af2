"""What happens to each token of a stream: the worker's steps, the chunk, the write, the clock."""

import asyncio
import gc
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from core import metrics as names
from core.errors import EngineError
from core.types import SamplingParams
from router.http import responses
from router.http.responses import event_stream
from router.openai.format import CHAT, COMPLETION, Formatter
from router.placement.step_stream import Inbox, StepReader
from router.request.attempt import Attempt
from router.request.generation import Delta, Generation, TextRequest
from router.request.metrics import TokenHistogram
from rpc import worker_pb2
from support.fake_answers import answer_text
from support.fake_workers import Fault
from support.router import Running, running
from support.sse import events, is_done, stream_body
from support.waiting import eventually


def steps_of(router: Running, worker_id: str = "decode-0") -> Any:
    return router.server.registry.workers[worker_id].steps


async def test_tokens_come_by_steps_or_on_their_own_calls_alike(router: Running) -> None:
    await eventually(lambda: steps_of(router).stream_id)
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "stream": True}
    worker = router.worker("decode-0")
    for worker.has_steps, worker.has_columns in ((True, True), (True, False), (False, False)):
        text, reason = stream_body((await router.post(**body)).text)
        assert (text, reason) == (answer_text("hello", 40), "length")
        await router.idle()
    assert not steps_of(router)._inboxes and not steps_of(router)._by_number


async def test_a_broken_stream_of_steps_is_a_pause(router: Running) -> None:
    """The attempts on it fail, and resume: no client sees a gap or a repeated token."""
    await eventually(lambda: steps_of(router).stream_id)
    worker = router.worker("decode-0")
    worker.gate = asyncio.Semaphore(0)
    fields = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "stream": True}
    answers = [asyncio.create_task(router.post(**fields)) for _ in range(3)]
    await eventually(lambda: worker.active == 3)
    for _ in range(6):
        worker.gate.release()
    await eventually(lambda: worker.num_tokens == 6)
    steps_of(router)._break("it was cut")
    for _ in range(60):
        worker.gate.release()
    for answer in answers:
        text = (await answer).text
        assert stream_body(text) == (answer_text("hello", 12), "length") and is_done(text)
    await router.idle()
    assert 'pdserve_retries_total{kind="resume"} 3.0' in (await router.http.get("/metrics")).text


async def test_a_token_makes_no_task_and_a_request_leaves_no_garbage(router: Running) -> None:
    """A task for each token, and attempts that wait for the collector with all that their calls
    hold, were most of what a stream cost."""
    await eventually(lambda: steps_of(router).stream_id)
    loop, tasks = asyncio.get_running_loop(), 0

    def counted(loop: Any, work: Any, **options: Any) -> asyncio.Task:
        nonlocal tasks
        tasks += 1
        return asyncio.Task(work, loop=loop, **options)

    async def tasks_of(num_tokens: int) -> int:
        before = tasks
        fields = {"prompt": "hello", "max_tokens": num_tokens, "temperature": 0, "stream": True}
        assert stream_body((await router.post(**fields)).text)[1] == "length"
        await router.idle()
        return tasks - before

    def living() -> set[int]:
        return {id(one) for one in gc.get_objects() if type(one) in (Attempt, Generation)}

    await tasks_of(5)
    gc.collect()
    gc.disable()
    others = living()  # of tests that failed, held by their tracebacks
    loop.set_task_factory(counted)
    try:
        few, many = await tasks_of(10), await tasks_of(250)
        assert many < few + 50  # timers and statuses go on meanwhile
        assert living() <= others
    finally:
        loop.set_task_factory(None)
        gc.enable()


async def test_readers_of_a_late_step_find_several_tokens() -> None:
    """A router that does not keep up reads on while it wakes readers, a few in a turn: every
    token comes, in order, for far fewer turns than tokens."""
    steps, turns = StepReader("decode-0", "x"), 0
    inboxes = {str(i): Inbox() for i in range(200)}
    steps._inboxes.update(inboxes)

    async def twenty_steps(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All at once, as they come to a router that was busy."""
        for index in range(20):
            tokens = worker_pb2.Tokens(first_index=index)
            message = worker_pb2.StepTokens(
                sequences=[
                    worker_pb2.SequenceTokens(request_id=name, tokens=tokens) for name in inboxes
                ]
            ).SerializeToString()
            writer.write(len(message).to_bytes(4, "big") + message)
        await reader.read()
        writer.close()

    async def read(inbox: Inbox) -> list[int]:
        nonlocal turns
        found = []
        while len(found) < 20:
            if not inbox._items:
                turns += 1
            found.append((await inbox.take()).first_index)
        return found

    async with await asyncio.start_server(twenty_steps, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        following = asyncio.create_task(steps.follow(f"127.0.0.1:{port}"))
        try:
            async with asyncio.timeout(20):
                found = await asyncio.gather(*map(read, inboxes.values()))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    assert found == [list(range(20))] * 200
    assert turns < 200 * 20 / 4


async def test_an_error_that_overtakes_tokens_costs_them_once(
    router_2p2d: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call's error and the worker's steps are two streams: the tokens that are late are made
    again elsewhere, once, and neither told nor counted twice."""
    router = router_2p2d
    for worker_id in ("decode-0", "decode-1"):
        await eventually(lambda: steps_of(router, worker_id).stream_id)  # noqa: B023
    faults = iter([Fault("error", 6, EngineError("broken"))])
    for name in ("decode-0", "decode-1"):
        router.worker(name).next_fault = lambda: next(faults, None)
    put, late = Inbox.put_quietly, 0

    def put_late(inbox: Inbox, tokens: Any) -> bool:
        nonlocal late
        index = tokens[0] if isinstance(tokens, tuple) else tokens.first_index
        if index >= 4 and late < 3:
            late += 1  # after the error: nobody waits for them any more
            return False
        return put(inbox, tokens)

    monkeypatch.setattr(Inbox, "put_quietly", put_late)
    text = (await router.post(
        prompt="hello", max_tokens=12, temperature=0, stream=True, return_token_ids=True,
        stream_options={"include_usage": True},
    )).text  # fmt: skip
    assert stream_body(text) == (answer_text("hello", 12), "length") and is_done(text)
    chunks = events(text)
    assert late == 3 and chunks[-1]["usage"]["completion_tokens"] == 12
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids") or ()]
    assert len(ids) == 12
    await router.idle()
    metrics = (await router.http.get("/metrics")).text
    assert 'pdserve_retries_total{kind="resume"} 1.0' in metrics
    assert "pdserve_generation_tokens_total 12.0" in metrics


async def test_a_worker_that_leaves_takes_its_steps_along() -> None:
    async with running(decodes=2) as router:
        for worker_id in ("decode-0", "decode-1"):
            await eventually(lambda: steps_of(router, worker_id).stream_id)  # noqa: B023
        ours = router.server.registry.workers["decode-0"]
        await router.worker("decode-0").die()
        await eventually(lambda: not ours.steps.stream_id)
        assert (await router.complete("hello", max_tokens=5))["choices"][0]["text"] == answer_text(
            "hello", 5
        )


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_plain_chunk_is_what_json_makes_of_it(shape: Any, include_usage: bool) -> None:
    texts = ["a", '"', "\\", "\0", "\u2028", "é", "😀", "\x7f</script>", "\n", "x" * 300]
    request = TextRequest(prompts=((1,), (2,)), sampling=SamplingParams(max_tokens=9))

    def formatter() -> Formatter:
        head = {"id": "id", "object": "", "created": 1, "model": 'a "model"\0'}
        return Formatter(
            shape, head, request, None, include_usage=include_usage, return_token_ids=False
        )

    quick = formatter()
    for index in (0, 1):
        # A token that completes no character is an event too, its request's first one as well.
        assert formatter().chunk(Delta(index, "", [1], None, None)).count(b"data: ") == 1
        quick.chunk(Delta(index, "first", [1], None, None))
        (choice,) = json.loads(quick.chunk(Delta(index, "", [1], None, None))[6:])["choices"]
        assert choice["finish_reason"] is None
        assert choice["delta"] == {"content": ""} if shape is CHAT else choice["text"] == ""
        assert quick.chunk(Delta(index, "", [], None, None)) == b""
    for text in texts:
        for index in (0, 1):
            slow = formatter()
            first = slow.chunk(Delta(index, text, [1], None, None))
            opened = 2 if shape is CHAT else 1
            (*_, whole) = first.split(b"\n\n")[:-1]
            assert len(first.split(b"\n\n")[:-1]) == opened
            assert quick.chunk(Delta(index, text, [1], None, None)) == whole + b"\n\n"


def test_the_histogram_of_tokens_is_like_any_other() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    known = Histogram("x", "help", ("who",), buckets=names.LATENCY_BUCKETS, registry=theirs)
    quick = TokenHistogram("x", "help", ("who",))
    ours.register(quick)
    for seconds in (0.0, 0.001, 0.0011, 3.0, 300.0, 301.0):
        known.labels("me").observe(seconds)
        quick.child(("me",)).observe(seconds)
    lines = [
        line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line
    ]
    assert generate_latest(ours).decode().splitlines() == lines


class Wire:
    """An ASGI server's end: what was sent, in pieces. `is_stuck`: it takes nothing."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_stuck = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if self.is_stuck:
                await asyncio.Event().wait()
            self.pieces.append(message["body"])

    async def run(self, source: Any) -> str:
        work = event_stream(lambda direct: source())
        return await work({"type": "http", "http_version": "1.1"}, None, self.send)  # type: ignore[arg-type]


async def test_events_that_follow_at_once_are_written_together() -> None:
    async def source():
        for number in range(200):
            yield b"%d\n" % number
        await asyncio.sleep(responses.MERGE_S * 4)  # a reader does not wait for the next one
        assert b"".join(wire.pieces) == b"".join(b"%d\n" % number for number in range(200))
        yield b"last\n"

    wire = Wire()
    assert await wire.run(source) == "ok"
    assert b"".join(wire.pieces) == b"".join(b"%d\n" % n for n in range(200)) + b"last\n"
    assert len(wire.pieces) < 20


async def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "SEND_TIMEOUT_S", 0.05)
    ended = False

    async def source():
        nonlocal ended
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.001)
        finally:
            ended = True

    wire = Wire()
    wire.is_stuck = True
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(wire.run(source))
    assert ended


async def test_a_client_of_http_1_0_gets_the_stream_unframed(router: Running) -> None:
    host, port = "127.0.0.1", router.server.http_port
    body = json.dumps(
        {"model": "fake", "prompt": "hi", "max_tokens": 5, "temperature": 0, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    answer = await reader.read()
    writer.close()
    _, _, text = answer.decode().partition("\r\n\r\n")
    assert is_done(text) and len(events(text)) == 5
    assert stream_body(text) == (answer_text("hi", 5), "length")
