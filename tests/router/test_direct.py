"""Tokens that go to the client by a call, past the generators: when they do, and when not."""

import asyncio
import json
import socket
from typing import Any

import pytest

from core.errors import EngineError
from router.http.responses import _EventWriter
from router.placement.step_stream import Inbox
from router.request.attempt import Attempt
from support.fake_answers import answer_text
from support.fake_workers import Fault
from support.router import Running
from support.sse import events, is_done, stream_body
from support.waiting import eventually


@pytest.fixture
def num_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many items the readers have not been woken for, and for how many they have."""
    counts, wake, take = [0, 0], Inbox.wake, Attempt._take

    def counted(inbox: Inbox) -> None:
        before = len(inbox._items)
        wake(inbox)
        counts[0] += before - len(inbox._items)

    def taken(attempt: Attempt, item: Any, decode: Any) -> Any:
        counts[1] += 1
        return take(attempt, item, decode)

    monkeypatch.setattr(Inbox, "wake", counted)
    monkeypatch.setattr(Attempt, "_take", taken)
    return counts


async def steps_are_open(router: Running) -> None:
    workers = router.server.registry.workers
    decodes = [worker for worker in workers.values() if worker.id.startswith("decode")]
    await eventually(lambda: all(worker.steps.stream_id for worker in decodes))


async def test_nearly_all_tokens_of_a_stream_go_past_its_readers(
    router: Running, num_direct: list[int]
) -> None:
    await steps_are_open(router)
    router.worker("decode-0").pause = lambda: 0.002
    text = (await router.post(
        prompt="hello", max_tokens=60, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )).text  # fmt: skip
    assert stream_body(text) == (answer_text("hello", 60), "length") and is_done(text)
    assert events(text)[-1]["usage"]["completion_tokens"] == 60
    assert num_direct[0] > 40 and num_direct[1] == 59
    await router.idle()
    metrics = (await router.http.get("/metrics")).text
    assert "pdserve_generation_tokens_total 60.0" in metrics
    assert "pdserve_inter_token_latency_seconds_count 59.0" in metrics


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["zzzz"]},
        {"n": 2, "temperature": 1.0, "seed": 1},
        {"stream": False},
        {"logprobs": 1},
    ],
    ids=str,
)
async def test_what_may_end_at_any_token_or_has_several_choices_is_read(
    router: Running, num_direct: list[int], fields: dict[str, Any]
) -> None:
    await steps_are_open(router)
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "stream": True, **fields}
    answer = await router.post(**body)
    assert answer.status_code == 200 and num_direct[1] >= 19
    assert num_direct[0] == 0


async def test_an_attempt_that_fails_behind_direct_tokens_is_resumed_behind_them(
    router_2p2d: Running, num_direct: list[int]
) -> None:
    router = router_2p2d
    await steps_are_open(router)
    faults = iter([Fault("error", 30, EngineError("broken"))])
    for name in ("decode-0", "decode-1"):
        router.worker(name).pause = lambda: 0.002
        router.worker(name).next_fault = lambda: next(faults, None)
    text = (await router.post(prompt="hello", max_tokens=60, temperature=0, stream=True)).text
    assert stream_body(text) == (answer_text("hello", 60), "length") and is_done(text)
    assert num_direct[0] > 40
    await router.idle()
    assert 'pdserve_retries_total{kind="resume"} 1.0' in (await router.http.get("/metrics")).text


async def test_a_client_that_takes_nothing_gets_nothing_direct(
    router: Running, num_direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes meanwhile waits in the inbox, and no text of it is made."""
    await steps_are_open(router)
    free = True
    monkeypatch.setattr(_EventWriter, "is_free", property(lambda writer: free))
    worker = router.worker("decode-0")
    worker.gate = asyncio.Semaphore(0)
    fields = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "stream": True}
    posting = asyncio.create_task(router.post(**fields))
    await eventually(lambda: worker.active == 1)
    for _ in range(10):
        worker.gate.release()
        await asyncio.sleep(0.005)
    await eventually(lambda: num_direct[0] > 5)
    free, before = False, num_direct[0]
    for _ in range(10):
        worker.gate.release()
        await asyncio.sleep(0.005)
    assert num_direct[0] == before
    free = True
    for _ in range(20):
        worker.gate.release()
        await asyncio.sleep(0.005)
    text = (await posting).text
    assert num_direct[0] > before
    assert stream_body(text) == (answer_text("hello", 40), "length")


async def test_a_client_that_leaves_ends_direct_tokens(router: Running) -> None:
    await steps_are_open(router)
    worker = router.worker("decode-0")
    worker.pause = lambda: 0.002
    fields = {"model": "fake", "prompt": "hi", "max_tokens": 2000, "stream": True}
    body = json.dumps(fields).encode()
    client = socket.create_connection(("127.0.0.1", router.server.http_port))
    client.setblocking(False)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    await asyncio.get_running_loop().sock_sendall(client, head + body)
    await eventually(lambda: worker.num_tokens > 20)
    client.close()
    await router.idle()
    assert worker.num_tokens < 2000


async def test_what_goes_wrong_with_a_direct_token_goes_to_its_reader() -> None:
    inbox = Inbox()

    def broken(item: Any) -> bool:
        raise ValueError("no such token")

    reading = asyncio.ensure_future(inbox.take(broken))
    await asyncio.sleep(0)
    inbox.put((0, 1))
    with pytest.raises(ValueError, match="no such token"):
        await reading
