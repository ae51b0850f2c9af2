"""Which workers the router uses as they come, go, hang and come back."""

import asyncio

from core.errors import EngineError
from core.types import Role
from rpc import worker_pb2
from support.fake_workers import Fault, answer_text, eventually
from support.router import running

TEXT = answer_text("hello", 4)


async def test_draining_workers_get_nothing_new_and_finish_what_they_have(router_2p2d):
    router = router_2p2d
    draining, other = router.worker("decode-0"), router.worker("decode-1")
    gate = draining.gate = other.gate = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(router.complete("hello", max_tokens=4)) for _ in range(2)]
    await eventually(lambda: draining.active == other.active == 1)
    draining.report(state=worker_pb2.WORKER_STATE_DRAINING)
    ours = router.server.registry.workers["decode-0"]
    await eventually(lambda: not ours.is_ready)
    tasks += [asyncio.create_task(router.complete("hello", max_tokens=4)) for _ in range(4)]
    for _ in range(6 * 3):
        gate.release()
    answers = await asyncio.gather(*tasks)
    assert {answer["choices"][0]["text"] for answer in answers} == {TEXT}
    assert len(draining.requests) == 1 and len(other.requests) == 5
    view = (await router.http.get("/cluster")).json()
    assert {w["id"]: w["state"] for w in view["workers"]}["decode-0"] == "draining"


async def test_a_worker_that_leaves_the_view_finishes_what_it_has(router_2p2d):
    router = router_2p2d
    first, second = router.worker("decode-0"), router.worker("decode-1")
    gate = first.gate = second.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(router.complete("hello", max_tokens=4))
    await eventually(lambda: first.active + second.active == 1)
    leaving = first if first.active else second
    router.cluster.remove(leaving.id)
    await eventually(lambda: leaving.id not in router.server.registry.workers)
    for _ in range(3):
        gate.release()
    assert (await task)["choices"][0]["text"] == TEXT
    assert leaving.num_tokens == 3


async def test_a_worker_that_does_not_answer_is_avoided_until_it_does(router_2p2d):
    """Its process lives and its view says ready; only the connection broke."""
    router = router_2p2d
    ours = router.server.registry.workers["prefill-0"]
    ours.suspect()
    assert not ours.is_ready
    router.worker("prefill-0").report(requests_running=0)
    await eventually(lambda: ours.is_ready)


async def test_a_new_incarnation_has_no_prefixes(router):
    """V49: predicted hits are real ones."""
    prompt = list(range(40))
    await router.complete(prompt, max_tokens=2)
    known = router.server.registry.workers["prefill-0"].prefixes
    assert len(known) == 2
    await router.cluster.add("prefill-0", Role.PREFILL)
    await router.ready()
    assert len(router.server.registry.workers["prefill-0"].prefixes) == 0
    again = await router.complete(prompt, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_warm_prompt_goes_where_it_is_warm(router_2p2d):
    router = router_2p2d
    for shift in range(4):
        prompt = [shift + i for i in range(64)]
        for expected in (0, 48, 48):
            usage = (await router.complete(prompt, max_tokens=2))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected
        salted = await router.complete(prompt, max_tokens=2, cache_salt=f"other{shift}")
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    counts = [len(router.worker(f"prefill-{i}").requests) for i in (0, 1)]
    assert min(counts) > 0


async def test_parallel_requests_spread_before_any_status_says_so(router_2p2d):
    router = router_2p2d
    prefills = [router.worker(f"prefill-{i}") for i in (0, 1)]
    decodes = [router.worker(f"decode-{i}") for i in (0, 1)]
    gate = asyncio.Semaphore(0)
    for worker in (*prefills, *decodes):
        worker.gate = gate
    tasks = [asyncio.create_task(router.complete(f"x{i}", max_tokens=2)) for i in range(8)]
    await eventually(lambda: sum(w.active for w in (*prefills, *decodes)) == 16)
    assert [w.active for w in (*prefills, *decodes)] == [4, 4, 4, 4]
    for _ in range(16):
        gate.release()
    await asyncio.gather(*tasks)


async def test_a_worker_that_fails_every_request_is_left_alone():
    """The breaker: three failures open it, and other workers serve meanwhile."""
    async with running(decodes=2) as router:
        bad = router.worker("decode-0")
        bad.next_fault = lambda: Fault("error", error=EngineError("always"))
        for _ in range(12):
            assert (await router.complete("hello", max_tokens=4))["choices"][0]["text"] == TEXT
        assert not router.server.registry.workers["decode-0"].breaker.allows()
        assert len(bad.requests) <= 5


async def test_the_controller_comes_back_with_changes(router):
    registry = router.server.registry
    router.cluster.set_state("decode-0", worker_pb2.WORKER_STATE_DEAD)
    await eventually(lambda: "decode-0" not in registry.workers)
    await router.cluster.add("decode-0", Role.DECODE)
    await router.ready()
    assert (await router.complete("hello", max_tokens=4))["choices"][0]["text"] == TEXT


async def test_a_stalled_engine_gets_nothing_new(router_2p2d):
    """V45."""
    stalled = router_2p2d.worker("prefill-0")
    ours = router_2p2d.server.registry.workers["prefill-0"]
    stalled.report(seconds_since_progress=100)
    await eventually(lambda: not ours.is_ready)
    await router_2p2d.complete("hello", max_tokens=4)
    assert not stalled.requests
