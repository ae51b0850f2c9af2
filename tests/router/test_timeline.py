"""One timeline per request: complete, bounded, and found by both of its ids."""

import asyncio
import json
import logging

import pytest

from core.errors import UnavailableError
from core.logs import formatter
from router.request.timeline import MAX_TOKEN_TIMES, Timeline, Timelines
from router.request.timeline_view import timeline_view
from rpc import worker_pb2
from support.fake_workers import FakeWorker, Fault
from support.router import Running, running
from support.sse import events
from support.waiting import eventually


def give_times(it: Running) -> None:
    prefill, decode = it.worker("prefill-0"), it.worker("decode-0")
    prefill.prefill_started.queue_seconds = 0.25
    prefill.first_token.prefill_seconds = 0.5
    prefill.first_token.chunks.add(num_tokens=8, offset_seconds=0.0, seconds=0.2)
    prefill.first_token.chunks.add(num_tokens=3, offset_seconds=0.3, seconds=0.2)
    decode.decode_started.MergeFrom(
        worker_pb2.DecodeStarted(
            kv_bytes=3_000_000,
            queue_seconds=0.125,
            queue_offset_seconds=0.3,
            kv_transfer_seconds=0.02,
            kv_tail_seconds=0.05,
            hand_over_seconds=0.8,
        )
    )
    decode.decode_started.pulls.add(bytes=2_000_000, offset_seconds=0.5, seconds=0.01)
    decode.decode_started.pulls.add(bytes=1_000_000, offset_seconds=0.7, seconds=0.01)
    decode.first_step = worker_pb2.DecodeStep(offset_seconds=0.85, seconds=0.04)


async def timeline_of(it: Running, name: str) -> dict:
    response = await it.http.get(f"/debug/requests/{name}")
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_timeline_joins_what_router_prefill_and_decode_measured(router: Running) -> None:
    give_times(router)
    response = await router.http.post(
        "/v1/completions",
        json={"model": "fake", "prompt": "hello world", "max_tokens": 5},
        headers={"x-request-id": "mine"},
    )
    found = await timeline_of(router, "mine")
    assert found["response_id"] == response.json()["id"]
    by_response = await timeline_of(router, found["response_id"])
    assert {**by_response, "age_seconds": 0} == {**found, "age_seconds": 0}
    assert (found["api"], found["outcome"]) == ("completions", "ok")
    assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (11, 5)
    (sequence,) = found["sequences"]
    assert sequence["finish_reason"] == "length"
    times = sequence["token_seconds"]
    assert len(times) == 5 and times == sorted(times)
    (attempt,) = sequence["attempts"]
    assert attempt["outcome"] == "ok" and attempt["decision"] == "disaggregated"
    assert (attempt["prefill_worker"], attempt["decode_worker"]) == ("prefill-0", "decode-0")
    assert attempt["prefill"]["queue_seconds"] == 0.25
    assert [chunk["num_tokens"] for chunk in attempt["prefill"]["chunks"]] == [8, 3]
    assert attempt["decode"]["kv_bytes"] == 3_000_000
    assert [pull["bytes"] for pull in attempt["decode"]["pulls"]] == [2_000_000, 1_000_000]
    assert attempt["decode"]["first_step"] == {"offset_seconds": 0.85, "seconds": 0.04}
    order = [
        0.0,
        found["tokenize_seconds"],
        attempt["placed_seconds"],
        found["ttft_seconds"],
        sequence["last_token_seconds"],
        found["e2e_seconds"],
    ]
    assert order == sorted(order)
    placed = attempt["placed_seconds"]
    spans = [(s["where"], s["name"], round(s["start"] - placed, 3)) for s in found["spans"]]
    assert [span for span in spans if span[0] != "router"] == [
        ("prefill-0", "queue", 0.0),
        ("prefill-0", "prefill", 0.25),
        ("prefill-0", "prefill", 0.55),
        ("decode-0", "queue", 0.3),
        ("decode-0", "kv pull", 0.5),
        ("decode-0", "kv pull", 0.7),
        ("decode-0", "commit to release", 0.75),
        ("decode-0", "decode", 0.8),
        ("decode-0", "first decode step", 0.85),
    ]
    notes = [s["note"] for s in found["spans"] if s["name"] == "kv pull"]
    assert notes[0] == "2.00 MB from prefill-0, 0.20 GB/s"


async def test_a_retry_and_a_resume_are_attempts_of_one_timeline(router_2p2d: Running) -> None:
    faults = iter([Fault("error", 0, UnavailableError("no power"))])
    later = iter([None, Fault("error", 2, UnavailableError("no power"))])
    for worker in router_2p2d.cluster.workers.values():
        source = faults if worker.id.startswith("prefill") else later
        worker.next_fault = lambda source=source: next(source, None)
    body = await router_2p2d.complete("hello", max_tokens=8, timings=True)
    (sequence,) = body["timings"]["sequences"]
    outcomes = [attempt["outcome"] for attempt in sequence["attempts"]]
    assert len(outcomes) == 3 and outcomes[-1] == "ok"
    assert all("no power" in outcome for outcome in outcomes[:2])
    resumed = [attempt["resumed_at_token"] for attempt in sequence["attempts"]]
    # The error may overtake tokens, which are then made again.
    assert resumed[:2] == [0, 0] and 1 <= resumed[2] <= 3
    assert sequence["attempts"][0]["prefill_worker"] != sequence["attempts"][1]["prefill_worker"]
    assert sequence["attempts"][1]["decode_worker"] != sequence["attempts"][2]["decode_worker"]
    assert len(sequence["token_seconds"]) == 8
    (summary,) = (await router_2p2d.http.get("/debug/requests")).json()["requests"]
    assert summary["num_attempts"] == 3 and summary["outcome"] == "ok"


async def test_waiting_for_a_worker_with_room_is_the_routers_queue() -> None:
    def small(worker: FakeWorker) -> None:
        worker.max_num_seqs = 1

    async with running(prepare=small) as it:
        gate = it.worker("decode-0").gate = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(it.complete("hello", max_tokens=2)) for _ in range(2)]
        await eventually(lambda: it.worker("decode-0").active == 2)
        tasks.append(asyncio.create_task(it.complete("hello", max_tokens=2, timings=True)))
        await eventually(lambda: len(it.server.frontend.pipeline._turnstile) == 1)
        await asyncio.sleep(0.05)
        for _ in tasks:
            gate.release()
        timings = (await asyncio.gather(*tasks))[-1]["timings"]
    (queued,) = [span for span in timings["spans"] if span["name"] == "router queue"]
    (attempt,) = timings["sequences"][0]["attempts"]
    assert queued["where"] == "router" and queued["seconds"] >= 0.05
    assert queued["start"] + queued["seconds"] == pytest.approx(attempt["placed_seconds"], abs=2e-6)


async def test_timings_come_with_the_answer_only_when_asked_for(router: Running) -> None:
    assert "timings" not in await router.complete("hello", max_tokens=2)
    response = await router.post(
        prompt="hello", max_tokens=2, stream=True, timings=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = events(response.text)
    assert not any("timings" in chunk for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert last["timings"]["response_id"] == last["id"]
    response = await router.post(prompt="hello", max_tokens=2, stream=True)
    assert "timings" not in response.text


async def test_a_colocated_worker_shows_its_prefill() -> None:
    async with running(colocated=1, prefills=0, decodes=0) as it:
        body = await it.complete("hello", max_tokens=3, n=2, timings=True)
        attempts = [s["attempts"][0] for s in body["timings"]["sequences"]]
        assert [a["decision"] for a in attempts] == ["local", "local"]
        names = [s["name"] for s in body["timings"]["spans"] if s["choice"] == 1]
        # A router that got no core in between shows that first.
        assert [name for name in names if name != "router queue"] == ["queue", "prefill", "decode"]


async def test_a_stop_string_is_a_good_end_and_a_lost_client_is_not(router: Running) -> None:
    text = (await router.complete("hello", max_tokens=4))["choices"][0]["text"]
    body = await router.complete("hello", max_tokens=9, stop=[text[2]], timings=True)
    (sequence,) = body["timings"]["sequences"]
    assert sequence["finish_reason"] == "stop"
    await router.idle()
    found = await timeline_of(router, body["id"])
    assert found["sequences"][0]["attempts"][0]["outcome"] == "ok"
    request = {"model": "fake", "prompt": "hello", "stream": True, "max_tokens": 3000}
    headers = {"x-request-id": "gone"}
    async with router.http.stream("POST", "/v1/completions", json=request, headers=headers) as r:
        async for _ in r.aiter_bytes():
            break
    await router.idle()
    found = await timeline_of(router, "gone")
    assert found["outcome"] == "cancelled"
    assert found["sequences"][0]["attempts"][0]["outcome"] == "cancelled"


async def test_an_unknown_id_and_a_strange_limit_are_refused(router: Running) -> None:
    missing = await router.http.get("/debug/requests/nobody")
    assert missing.status_code == 404 and "nobody" in missing.json()["error"]["message"]
    for limit in (0, 1001):
        response = await router.http.get("/debug/requests", params={"limit": limit})
        assert response.status_code == 400


def test_memory_is_bounded() -> None:
    timelines = Timelines(limit=3)
    kept = [Timeline(f"r{i}", "chat") for i in range(5)]
    for timeline in kept:
        timeline.response_id = f"chatcmpl-{timeline.id}"
        timelines.keep(timeline)
    assert len(timelines) == 3
    assert timelines.find("r0") is None and timelines.find("chatcmpl-r1") is None
    assert timelines.find("r2") is kept[2]
    assert [t.id for t in timelines.recent(2)] == ["r4", "r3"]
    again = Timeline("r2", "chat")
    timelines.keep(again)
    timelines.keep(Timeline("r5", "chat"))
    assert timelines.find("r2") is again
    granted = sum(again.take_room(100) for _ in range(MAX_TOKEN_TIMES))
    assert granted == MAX_TOKEN_TIMES
    for number in range(600):
        timelines.events.add("placed", str(number))
    assert len(timelines.events.since(0)) == 512
    assert [e["id"] for e in timelines.events.since(598)] == ["598", "599"]
    assert timeline_view(again)["sequences"] == []


async def test_a_request_leaves_one_line_in_the_log_with_its_ids(
    router: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """What a collector joins by: the client's own id, in JSON fields and in the words."""
    with caplog.at_level(logging.INFO, "router.request.timeline"):
        response = await router.http.post(
            "/v1/completions",
            json={"model": "fake", "prompt": "hello world", "max_tokens": 5},
            headers={"x-request-id": "mine"},
        )
    (record,) = [r for r in caplog.records if r.name == "router.request.timeline"]
    assert record.getMessage().startswith("request mine: ok, 11 + 5 tokens in ")
    line = json.loads(formatter("json").format(record))
    assert line["response_id"] == response.json()["id"]
    assert (line["request_id"], line["outcome"], line["num_attempts"]) == ("mine", "ok", 1)
    assert (line["num_prompt_tokens"], line["num_tokens"]) == (11, 5)
    assert 0 < line["ttft_seconds"] <= line["seconds"]
    assert "hello" not in formatter("json").format(record)
