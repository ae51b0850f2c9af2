"""Workers and clients that fail at every point: one outcome each, and nothing left behind."""

import asyncio
import json
import random
from contextlib import suppress

import httpx
import pytest

from core.errors import EngineError, HandoverError, OverloadedError, RequestError, UnavailableError
from core.types import Role
from router.request.pipeline import Waits
from rpc import worker_pb2
from support.fake_answers import BLOCK_SIZE, answer_text
from support.fake_workers import Fault
from support.router import Running, running
from support.sse import events, is_done, stream_body
from support.waiting import eventually

LOST = UnavailableError("lost")
TEXT = answer_text("hello", 8)


def first_call_fails(router: Running, role: str, fault: Fault) -> None:
    """Whichever worker of `role` is asked first fails in that call; no other does."""
    taken = False

    def take() -> Fault | None:
        nonlocal taken
        if taken:
            return None
        taken = True
        return fault

    for worker in router.cluster.everyone:
        if worker.role == role:
            worker.next_fault = take


def used(router: Running, role: str) -> list[worker_pb2.GenerationRequest]:
    return [r for w in router.cluster.everyone if w.role == role for r in w.requests]


async def metric(router: Running, name: str) -> float:
    for line in (await router.http.get("/metrics")).text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    return 0.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("error", error=LOST),
        Fault("error", error=EngineError("no")),
        Fault("error", error=OverloadedError("full")),
        Fault("cut"),
        Fault("die"),
    ],
    ids=lambda f: f"{f.action}-{type(f.error).__name__}",
)
async def test_retry_before_the_first_token(router_2p2d, role, fault):
    """V54: on another worker, under a new attempt id, and the client sees nothing of it."""
    first_call_fails(router_2p2d, role, fault)
    for worker in router_2p2d.cluster.everyone:
        if role == "decode" and worker.role == "prefill":
            worker.gate = asyncio.Semaphore(0)  # P is slower than D's failure

    async def open_gates() -> None:
        await eventually(lambda: len(used(router_2p2d, "decode")) >= 2)
        for worker in router_2p2d.cluster.everyone:
            if worker.gate is not None:
                worker.gate.release()

    opener = asyncio.create_task(open_gates()) if role == "decode" else None
    answer = await router_2p2d.complete("hello", max_tokens=8)
    if opener is not None:
        await opener
    assert answer["choices"][0]["text"] == TEXT
    requests = used(router_2p2d, role)
    assert len({r.request_id for r in requests}) == 2
    assert sum(bool(w.requests) for w in router_2p2d.cluster.everyone if w.role == role) == 2
    assert all(not r.output_token_ids for r in requests)
    assert await metric(router_2p2d, 'pdserve_retries_total{kind="retry"}') == 1
    await router_2p2d.idle()


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("action", ["error", "cut", "die"])
@pytest.mark.parametrize("stream", [False, True])
async def test_resume_after_the_first_token(after, action, stream):
    """The stream goes on elsewhere with the same tokens, logprobs and usage: no gap, no repeat."""
    async with running(prefills=1, decodes=2) as router:
        first_call_fails(router, "decode", Fault(action, after, LOST))
        fields = {"prompt": "hello", "max_tokens": 8, "temperature": 1, "seed": 5, "logprobs": 1}
        response = await router.post(**fields, stream=stream)
        expected = answer_text("hello", 8, 5)
        if stream:
            assert is_done(response.text)
            choices = [event["choices"][0] for event in events(response.text)]
            assert stream_body(response.text) == (expected, "length")
            logprobs = [v for c in choices for v in c["logprobs"]["token_logprobs"]]
        else:
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (expected, "length")
            logprobs = choice["logprobs"]["token_logprobs"]
            assert response.json()["usage"]["completion_tokens"] == 8
        assert logprobs == [-0.5 - i for i in range(8)]
        resumed = used(router, "decode")[-1]
        assert bytes(resumed.output_token_ids) == expected[: len(resumed.output_token_ids)].encode()
        assert len({r.request_id for r in used(router, "decode")}) == 2
        await router.idle()


async def test_resume_at_the_last_token_needs_no_decode_leg():
    async with running(decodes=2) as router:
        first_call_fails(router, "decode", Fault("error", 2, LOST))
        answer = await router.complete("hello", max_tokens=4)
        assert answer["choices"][0]["text"] == TEXT[:4]
        assert router.worker("prefill-0").hand_overs == [True, False]
        assert len(used(router, "decode")) == 1


async def test_attempts_are_bounded_and_the_real_cause_is_told(router):
    """V07, V26: the client sees P's own error as an error object."""
    prefill = router.worker("prefill-0")
    prefill.next_fault = lambda: Fault("error", error=UnavailableError("out of blocks"))
    response = await router.post(prompt="hello", max_tokens=4)
    assert response.status_code == 503
    assert "out of blocks" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"
    assert len(prefill.requests) == 3
    await router.idle()


async def test_overload_of_every_pair_is_429(router):
    router.worker("prefill-0").next_fault = lambda: Fault("error", error=OverloadedError("full"))
    response = await router.post(prompt="hello", max_tokens=4)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_a_request_that_a_worker_refuses_is_not_retried(router_2p2d):
    refusal = RequestError("too long for this pool", param="prompt")
    first_call_fails(router_2p2d, "prefill", Fault("error", error=refusal))
    response = await router_2p2d.post(prompt="hello", max_tokens=4)
    assert response.status_code == 400
    assert len(used(router_2p2d, "prefill")) == 1
    await router_2p2d.idle()


async def test_failing_prefill_cancels_decode(router):
    """V07: D was waiting for KV that will never come."""
    prefill, decode = router.worker("prefill-0"), router.worker("decode-0")
    prefill.next_fault = lambda: Fault("error", error=RequestError("no"))
    decode.next_fault = lambda: Fault("hang")
    assert (await router.post(prompt="hello", max_tokens=4)).status_code == 400
    await router.idle()
    assert decode.num_cancelled == len(decode.requests)


async def test_failing_decode_cancels_prefill_before_and_after_its_token(router):
    """V02: nothing stays pinned on P when D refuses, or never takes over."""
    prefill, decode = router.worker("prefill-0"), router.worker("decode-0")
    prefill.next_fault = lambda: Fault("hang")
    decode.next_fault = lambda: Fault("error", error=RequestError("no"))
    assert (await router.post(prompt="hello", max_tokens=4)).status_code == 400
    await eventually(lambda: prefill.num_cancelled == 1)
    prefill.next_fault = lambda: None
    decode.next_fault = lambda: Fault("hang")
    body = {"model": "fake", "prompt": "hello", "max_tokens": 4, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as response:
        assert await anext(response.aiter_lines())
        assert prefill.held
    await eventually(lambda: not prefill.held)
    assert prefill.num_cancelled == 2
    await router.idle()


@pytest.mark.parametrize("action", ["error", "die"])
async def test_prefill_that_fails_during_the_hand_over_ends_the_attempt(action):
    """The first token is out; D waits for KV that is lost. The stream resumes elsewhere."""
    async with running(prefills=2) as router:
        first_call_fails(router, "prefill", Fault(action, 1, HandoverError("gone")))
        faults = iter([Fault("hang")])
        router.worker("decode-0").next_fault = lambda: next(faults, None)
        answer = await router.complete("hello", max_tokens=8)
        assert answer["choices"][0]["text"] == TEXT
        assert [len(r.output_token_ids) for r in used(router, "decode")] == [0, 1]
        await router.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_aborts_both_legs(router, stream, phase):
    """V01, V23."""
    gated = router.worker(f"{phase}-0")
    gated.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(
        router.post(prompt="hello", max_tokens=8, temperature=0, stream=stream)
    )
    await eventually(lambda: gated.active == 1)
    if phase == "decode":
        await eventually(lambda: router.worker("prefill-0").active == 0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await router.idle()
    assert gated.num_cancelled == 1
    gated.gate = None
    answer = await router.complete("hello", max_tokens=8)
    assert answer["choices"][0]["text"] == TEXT


async def test_a_client_that_leaves_ends_every_choice(router):
    decode = router.worker("decode-0")
    decode.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(router.post(prompt=["a", "b"], n=3, max_tokens=8))
    await eventually(lambda: decode.active == 6)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await router.idle()
    assert decode.num_cancelled == 6


async def test_one_failed_choice_ends_the_request(router):
    decode = router.worker("decode-0")
    faults = iter([None, Fault("error", 2, RequestError("no"))])
    decode.next_fault = lambda: next(faults, None)
    response = await router.post(prompt="hello", n=2, max_tokens=50, stream=True)
    last = events(response.text)[-1]
    assert last["error"]["message"].endswith("no") and not is_done(response.text)
    await router.idle()


async def test_an_error_in_mid_stream_ends_it_without_done():
    """V26, V40: an error event, then the end; finish_reason stays null."""
    async with running("router.max_attempts=1") as router:
        router.worker("decode-0").next_fault = lambda: Fault("error", 2, EngineError("broken"))
        response = await router.post(prompt="hello", max_tokens=8, temperature=0, stream=True)
        assert response.status_code == 200
        chunks = events(response.text)
        assert set(chunks[-1]) == {"error"}
        assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
        # The error may overtake tokens: they come by the stream that all attempts share.
        assert TEXT[:3].startswith("".join(c["choices"][0]["text"] for c in chunks[:-1]))
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
        assert not is_done(response.text)
        whole = await router.post(prompt="hello", max_tokens=8)
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_error"
        await router.idle()


async def test_tokens_out_of_order_are_never_shown(router_2p2d):
    """A worker that skips a token is not believed: the stream resumes elsewhere."""
    first_call_fails(router_2p2d, "decode", Fault("skip", 2))
    answer = await router_2p2d.complete("hello", max_tokens=8)
    assert answer["choices"][0]["text"] == TEXT


async def test_a_replaced_worker_fails_its_attempts_at_once_and_the_stream_goes_on(router):
    """The controller knows of a death that no connection has noticed."""
    old = router.worker("decode-0")
    old.next_fault = lambda: Fault("hang", 2)
    task = asyncio.create_task(router.post(prompt="hello", max_tokens=8, temperature=0))
    await eventually(lambda: old.num_tokens == 2)
    router.cluster.set_state("decode-0", worker_pb2.WORKER_STATE_DEAD)
    await router.cluster.add("decode-0", Role.DECODE)
    assert (await task).json()["choices"][0]["text"] == TEXT
    assert len(used(router, "prefill")) == 2
    await router.idle()


async def test_nobody_can_serve():
    """V47: a router without workers is alive, says so, and refuses with 503."""
    async with running(prefills=1, decodes=0) as router:
        assert (await router.http.get("/health")).status_code == 200
        assert (await router.http.get("/ready")).status_code == 503
        assert (await router.http.get("/v1/models")).status_code == 200
        response = await router.post(prompt="hello", max_tokens=4)
        assert response.status_code == 503
        assert "no decode worker is ready" in response.json()["error"]["message"]
        await router.cluster.add("decode-0", Role.DECODE)
        await router.ready()
        assert (await router.http.get("/ready")).status_code == 200
        assert (await router.complete("hello", max_tokens=8))["choices"][0]["text"] == TEXT


async def test_a_short_gap_without_workers_is_waited_out():
    async with running(waits=Waits(first_s=10, again_s=10)) as router:
        router.cluster.set_state("decode-0", worker_pb2.WORKER_STATE_DEAD)
        registry = router.server.registry
        await eventually(lambda: not registry.can_serve())
        task = asyncio.create_task(router.post(prompt="hello", max_tokens=8, temperature=0))
        await eventually(lambda: router.server.admission.in_flight == 1)
        await router.cluster.add("decode-0", Role.DECODE)
        assert (await task).json()["choices"][0]["text"] == TEXT


async def test_the_last_view_stands_without_a_controller(router):
    await router.cluster.stop_controller()
    assert (await router.complete("hello", max_tokens=8))["choices"][0]["text"] == TEXT
    assert (await router.http.get("/ready")).status_code == 200


async def test_too_many_requests_are_429_and_slots_last_to_the_end_of_the_body():
    """V53."""
    async with running("router.max_concurrent_requests=2") as router:
        decode = router.worker("decode-0")
        decode.gate = asyncio.Semaphore(0)
        held = [
            asyncio.create_task(router.post(prompt="hello", max_tokens=3, stream=True))
            for _ in range(2)
        ]
        await eventually(lambda: router.server.admission.in_flight == 2)
        refused = await router.post(prompt="hello", max_tokens=3)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        too_big = await router.post(prompt="hello", max_tokens=3, n=3)
        assert too_big.status_code == 400
        for _ in range(4):
            decode.gate.release()
        assert all(is_done(answer.text) for answer in await asyncio.gather(*held))
        await router.idle()
        decode.gate = None
        assert (await router.post(prompt="hello", max_tokens=3)).status_code == 200


async def test_nothing_leaks_when_clients_leave_at_random(router_2p2d):
    """V50: 200 requests cut anywhere; the gauges end at 0 and the next request succeeds."""
    dice = random.Random(1)
    for worker in router_2p2d.cluster.everyone:
        worker.pause = lambda: dice.random() * 0.004

    async def one(number: int) -> None:
        fields = {"prompt": f"p{number % 7}", "max_tokens": 6, "n": 1 + number % 3}
        request = router_2p2d.post(**fields, stream=bool(number % 2))
        with suppress(TimeoutError, httpx.HTTPError):
            await asyncio.wait_for(request, dice.random() * longest_s)

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(router_2p2d.complete("hello", max_tokens=6) for _ in range(25)))
    longest_s = 2 * (loop.time() - began)  # on this machine, now
    for start in range(0, 200, 25):
        await asyncio.gather(*(one(number) for number in range(start, start + 25)))
    await router_2p2d.idle()
    assert sum(worker.num_cancelled for worker in router_2p2d.cluster.everyone) > 0
    for worker in router_2p2d.server.registry.workers.values():
        assert worker.num_passengers == worker._blocks == worker._queued_tokens == 0
    text = (await router_2p2d.http.get("/metrics")).text
    assert "pdserve_router_requests_in_flight 0.0" in text
    for worker in router_2p2d.cluster.everyone:
        worker.pause = None
    assert (await router_2p2d.complete("hello", max_tokens=8))["choices"][0]["text"] == TEXT


async def test_stopping_lets_streams_end_or_ends_them_with_an_error():
    """V63: a router that goes, whose grace is too short for one stream."""
    async with running() as router:
        decode = router.worker("decode-0")
        decode.gate = asyncio.Semaphore(2)
        slow = asyncio.create_task(router.post(prompt="hello", max_tokens=8, stream=True))
        await eventually(lambda: decode.num_tokens == 2)
        await router.server.close(grace_s=0.05)
        text = (await slow).text
        assert "stopping" in events(text)[-1]["error"]["message"] and not is_done(text)
        await eventually(lambda: router.cluster.is_quiet)


async def test_mismatched_workers_are_never_paired(caplog):
    def prepare(worker):
        if worker.id in ("prefill-1", "decode-0"):
            worker.compatibility = {**worker.compatibility, "dtype": "bfloat16"}

    async with running(prefills=2, decodes=2, prepare=prepare) as router:
        for _ in range(6):
            await router.complete("hello", max_tokens=3)
        pairs = {
            (p.id, d.id)
            for p in router.cluster.everyone
            for d in router.cluster.everyone
            if {r.request_id for r in p.requests} & {r.request_id for r in d.requests}
            and p.role == "prefill"
            and d.role == "decode"
        }
        assert pairs <= {("prefill-0", "decode-1"), ("prefill-1", "decode-0")} and pairs
        assert "never paired: dtype" in caplog.text


async def test_workers_whose_blocks_the_hand_over_bridges_are_paired():
    """V14: another block size, another tensor-parallel degree; an odd size is not bridged."""
    sizes = {"prefill-0": str(2 * BLOCK_SIZE), "prefill-1": str(BLOCK_SIZE + 1)}

    def prepare(worker):
        size = sizes.get(worker.id, str(BLOCK_SIZE))
        ranks = {"tensor_parallel_size": "2" if worker.role == "decode" else "1"}
        worker.compatibility = {**worker.compatibility, **ranks, "block_size": size}

    async with running(prefills=2, decodes=1, prepare=prepare) as router:
        for _ in range(4):
            await router.complete("hello", max_tokens=3)
        served = {w.id: len(w.requests) for w in router.cluster.everyone}
        assert served == {"prefill-0": 4, "prefill-1": 0, "decode-0": 4}


async def test_colocated_prefills_for_itself():
    async with running(prefills=0, decodes=0, colocated=2) as router:
        answer = await router.complete(list(range(40)), max_tokens=4)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        warm = await router.complete(list(range(40)), max_tokens=4)
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert warm["choices"] == answer["choices"]
        first_call_fails(router, "colocated", Fault("error", 3, HandoverError("lost")))
        again = await router.complete(list(range(40)), max_tokens=8)
        assert again["choices"][0]["text"].startswith(answer["choices"][0]["text"])
        assert again["usage"]["completion_tokens"] == 8
        await router.idle()
        view = json.loads((await router.http.get("/cluster")).text)
        assert [w["role"] for w in view["workers"]] == ["colocated"] * 2
