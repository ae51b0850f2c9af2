"""What survives a lost worker, and how often anything is tried again."""

import asyncio

import pytest

from core.errors import EngineError, UnavailableError
from core.types import Role
from router.placement import breaker as breaker_module
from router.placement import worker as worker_module
from router.request.retry_budget import RetryBudget
from support.fake_answers import answer_text, says
from support.fake_workers import FakeWorker, Fault
from support.router import Running, running
from support.sse import stream_body
from support.waiting import eventually

LOST = UnavailableError("lost")


def fail_first_decode(router: Running, after: int) -> None:
    faults = iter([Fault("die", after)])
    for worker in router.cluster.everyone:
        if worker.role == "decode":
            worker.next_fault = lambda: next(faults, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", range(1, 7))
async def test_a_stop_string_is_found_across_a_lost_worker(stream, after):
    """Held-back text and the search for stop strings go on where they were."""
    script = says("keep STOP never")

    def prepare(worker: FakeWorker) -> None:
        worker.script = script

    async with running(decodes=2, prepare=prepare) as router:
        fields = {"prompt": "x", "max_tokens": 20, "stop": ["STOP", "OPS"], "temperature": 0}
        usage = (await router.post(**fields)).json()["usage"]
        fail_first_decode(router, after)
        response = await router.post(**fields, stream=stream)
        assert sum(bool(w.requests) for w in router.cluster.everyone if w.role == "decode") == 2
        if stream:
            assert stream_body(response.text) == ("keep ", "stop")
        else:
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("keep ", "stop")
            assert response.json()["usage"] | {"prompt_tokens_details": None} == usage | {
                "prompt_tokens_details": None
            }
        await router.idle()


async def test_every_parameter_of_the_answer_goes_along_to_the_next_worker():
    """V54: the same dice, limits, penalties and grammar, under a new attempt id."""
    async with running(decodes=2) as router:
        fail_first_decode(router, 3)
        response = await router.post(
            prompt="hello", max_tokens=8, min_tokens=2, temperature=0.7, top_k=9, top_p=0.9,
            min_p=0.1, seed=77, presence_penalty=0.5, frequency_penalty=0.25,
            repetition_penalty=1.1, logit_bias={"5": 1}, logprobs=2, cache_salt="s",
            guided_regex="[a-z]+",
        )  # fmt: skip
        assert response.json()["choices"][0]["text"] == answer_text("hello", 8, 77)
        first, second = (w.requests[0] for w in router.cluster.everyone if w.role == "decode")
        if first.output_token_ids:
            first, second = second, first
        assert len(second.output_token_ids) == 4
        assert first.sampling == second.sampling
        assert first.prompt_token_ids == second.prompt_token_ids
        assert (first.cache_salt, first.client_request_id) == (
            second.cache_salt,
            second.client_request_id,
        )
        assert first.request_id != second.request_id


def test_the_budget_covers_a_lost_worker_and_not_a_system_where_everything_fails():
    budget = RetryBudget(100)
    assert all(budget.take() for _ in range(100))
    assert not budget.take()
    repeated = 0
    for _ in range(1000):
        budget.add_request()
        repeated += budget.take() + budget.take()
    assert repeated == pytest.approx(200, abs=1)
    for _ in range(1000):
        budget.add_request()
    assert sum(budget.take() for _ in range(200)) == 100


async def test_retries_are_budgeted_over_all_requests(monkeypatch):
    monkeypatch.setattr(breaker_module, "_THRESHOLD", 1000)  # it would stop them sooner
    settings = ("router.max_concurrent_requests=4", "router.max_attempts=3")
    async with running(*settings) as router:
        prefill = router.worker("prefill-0")
        prefill.next_fault = lambda: Fault("error", error=EngineError("always"))
        for _ in range(10):
            assert (await router.post(prompt="hello", max_tokens=2)).status_code == 500
        # Ten requests, four attempts from the start and one that the ten brought.
        assert len(prefill.requests) == 10 + 4 + 1


async def test_a_worker_that_recovers_is_probed_by_one_request_and_used_again(monkeypatch):
    monkeypatch.setattr(breaker_module, "_FIRST_PAUSE_S", 0.2)
    async with running(decodes=2) as router:
        bad = router.worker("decode-0")
        ours = router.server.registry.workers["decode-0"]
        bad.next_fault = lambda: Fault("error", error=EngineError("broken"))
        while ours.breaker.allows():
            await router.complete("hello", max_tokens=2)
        num_failed = len(bad.requests)
        await eventually(ours.breaker.allows)
        bad.next_fault = lambda: None
        gate = bad.gate = router.worker("decode-1").gate = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(router.complete("hello", max_tokens=2)) for _ in range(6)]
        await eventually(lambda: bad.active + router.worker("decode-1").active == 6)
        assert len(bad.requests) == num_failed + 1, "half open: one probe"
        for _ in range(6):
            gate.release()
        await asyncio.gather(*tasks)
        assert ours.breaker.allows()
        bad.gate = router.worker("decode-1").gate = None
        await asyncio.gather(*(router.complete("hello", max_tokens=2) for _ in range(6)))
        assert len(bad.requests) > num_failed + 2


async def test_streams_on_an_engine_that_stalls_go_on_elsewhere(router_2p2d):
    """V45: its process lives and answers; only its engine does not get on."""
    router = router_2p2d
    stalled = router.worker("decode-0")
    for name in ("decode-0", "decode-1"):
        faults = iter([Fault("hang", 2)] if name == "decode-0" else [])
        router.worker(name).next_fault = lambda faults=faults: next(faults, None)
    task = asyncio.create_task(router.complete("hello", max_tokens=8))
    other = asyncio.create_task(router.complete("hello", max_tokens=8))
    await eventually(lambda: stalled.num_tokens == 2)
    stalled.report(seconds_since_progress=61.0)
    for answer in await asyncio.gather(task, other):
        assert answer["choices"][0]["text"] == answer_text("hello", 8)
    await router.idle()
    assert not router.server.registry.workers["decode-0"].is_ready
    stalled.report(seconds_since_progress=0.0)
    await router.ready()


async def test_a_worker_that_says_nothing_any_more_is_not_used(monkeypatch):
    """V45: a frozen process keeps its connections open. An idle one is not taken for it."""
    monkeypatch.setattr(worker_module, "_STATUS_SILENCE_S", 1.0)

    def prepare(worker: FakeWorker) -> None:
        worker.status_every_s = 0.05

    async with running(prefills=2, prepare=prepare) as router:
        silent = router.worker("prefill-0")
        silent.is_silent = True
        ours = router.server.registry.workers
        await eventually(lambda: not ours["prefill-0"].is_ready)
        for _ in range(4):
            await router.complete("hello", max_tokens=2)
        assert not silent.requests
        silent.is_silent = False
        await router.ready()


async def test_a_worker_that_was_never_there_hinders_nobody():
    """V47: the view says it is ready, and nobody answers at its address."""
    async with running() as router:
        absent = await router.cluster.add("prefill-1", Role.PREFILL)
        await absent.die()
        ours = router.server.registry.workers
        await eventually(lambda: "prefill-1" in ours and not ours["prefill-1"].is_ready)
        for _ in range(3):
            await router.complete("hello", max_tokens=2)
        models = (await router.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["fake"]
        assert (await router.http.get("/ready")).status_code == 200
        assert not absent.requests
