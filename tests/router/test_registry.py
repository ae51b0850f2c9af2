"""Which workers the router uses as they come, go, hang and come back."""

import asyncio

import pytest

from core.block_hash import block_hashes, short_hash
from core.errors import EngineError
from core.types import Role
from rpc import worker_pb2
from rpc.worker_pb2 import KvBlockEvents
from support.fake_answers import BLOCK_SIZE, answer_text
from support.fake_workers import FakeWorker, Fault
from support.router import Running, running
from support.waiting import eventually

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


def known(router: Running, worker_id: str, prompt: list[int]) -> int:
    """Leading blocks of a prompt that the router believes a worker to have."""
    holdings = router.server.registry.workers[worker_id].holdings
    assert holdings is not None
    return holdings.match([short_hash(value) for value in block_hashes(prompt, BLOCK_SIZE)])


async def cached_tokens(router: Running, prompt: list[int], **fields: str) -> int:
    usage = (await router.complete(prompt, max_tokens=2, **fields))["usage"]
    await router.synced()
    return usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_new_incarnation_has_no_prefixes(router):
    """V49: predicted hits are real ones."""
    prompt = list(range(40))
    assert await cached_tokens(router, prompt) == 0
    assert known(router, "prefill-0", prompt) == 2
    await router.cluster.add("prefill-0", Role.PREFILL)
    await router.ready()
    assert known(router, "prefill-0", prompt) == 0
    assert await cached_tokens(router, prompt) == 0


async def test_an_evicted_prefix_is_no_hit(router):
    prompt = list(range(64))
    assert await cached_tokens(router, prompt) == 0
    worker = router.worker("prefill-0")
    worker.evict(block_hashes(prompt, BLOCK_SIZE)[2:])
    await router.synced()
    assert known(router, "prefill-0", prompt) == 2
    assert await cached_tokens(router, prompt) == 32


async def test_the_index_is_built_again_when_its_stream_breaks(router):
    prompt, other = list(range(64)), list(range(100, 164))
    await cached_tokens(router, prompt)
    worker = router.worker("prefill-0")
    worker.tell(None)
    await eventually(lambda: known(router, "prefill-0", prompt) == 0)
    worker.cached = set(block_hashes(other, BLOCK_SIZE))  # changes that nobody heard of
    await eventually(lambda: known(router, "prefill-0", other) == 4)
    assert known(router, "prefill-0", prompt) == 0 and worker.num_block_streams == 2


@pytest.mark.parametrize(
    "event",
    [KvBlockEvents(sequence=7), KvBlockEvents(is_snapshot=True, stored=range(300))],
    ids=["a gap", "more than it has"],
)
async def test_events_that_cannot_be_true_are_asked_for_again(router, event):
    prompt = list(range(64))
    await cached_tokens(router, prompt)
    worker = router.worker("prefill-0")
    worker.tell(event)
    await eventually(lambda: worker.num_block_streams == 2)
    await eventually(lambda: known(router, "prefill-0", prompt) == 4)


async def test_a_worker_without_a_prefix_cache_is_never_believed_to_have_one():
    def prepare(worker: FakeWorker) -> None:
        worker.prefix_caching = False

    async with running(prepare=prepare) as router:
        prompt = list(range(64))
        router.worker("decode-0").gate = gate = asyncio.Semaphore(0)
        task = asyncio.create_task(router.complete(prompt, max_tokens=2))
        await eventually(lambda: router.worker("decode-0").active == 1)
        assert known(router, "prefill-0", prompt) == 0
        gate.release()
        await task
        assert router.worker("prefill-0").num_block_streams == 0


async def test_a_warm_prompt_goes_where_it_is_warm(router_2p2d):
    router = router_2p2d
    for shift in range(4):
        prompt = [shift + i for i in range(64)]
        assert [await cached_tokens(router, prompt) for _ in range(3)] == [0, 48, 48]
        assert await cached_tokens(router, prompt, cache_salt=f"other{shift}") == 0
    counts = [len(router.worker(f"prefill-{i}").requests) for i in (0, 1)]
    assert min(counts) > 0


async def test_prompts_that_begin_alike_and_come_at_once_meet_on_one_worker(router_2p2d):
    router = router_2p2d
    gate = asyncio.Semaphore(0)
    prefills = [router.worker(f"prefill-{i}") for i in (0, 1)]
    for worker in prefills:
        worker.gate = gate
    prompts = [[*range(1, 129), 200 + i] for i in range(2)]
    tasks = [asyncio.create_task(router.complete(prompt, max_tokens=1)) for prompt in prompts]
    await eventually(lambda: sum(worker.active for worker in prefills) == 2)
    assert sorted(worker.active for worker in prefills) == [0, 2]
    for _ in prompts:
        gate.release()
    await asyncio.gather(*tasks)


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


async def test_a_controller_that_comes_back_elsewhere_is_found_by_the_workers_word(router_2p2d):
    """One worker still says what was so before; that is tried too, and then the next again."""
    router, registry = router_2p2d, router_2p2d.server.registry
    router.worker("prefill-0").report(controller=router.cluster.controller)
    router.worker("prefill-1").report(controller="127.0.0.1:1")
    await router.cluster.move_controller()
    await router.cluster.add("decode-2", Role.DECODE)
    router.worker("decode-1").report(controller=router.cluster.controller)
    await eventually(lambda: "decode-2" in registry.workers)
    assert (await router.complete("hello", max_tokens=4))["choices"][0]["text"] == TEXT
    view = (await router.http.get("/cluster")).json()
    assert view["controller"] == router.cluster.controller
    assert view["controller_reachable"]
    await router.cluster.stop_controller()
    await eventually(lambda: not registry.hears_controller)
    assert not (await router.http.get("/cluster")).json()["controller_reachable"]


async def test_a_stalled_engine_gets_nothing_new(router_2p2d):
    """V45."""
    stalled = router_2p2d.worker("prefill-0")
    ours = router_2p2d.server.registry.workers["prefill-0"]
    stalled.report(seconds_since_progress=100)
    await eventually(lambda: not ours.is_ready)
    await router_2p2d.complete("hello", max_tokens=4)
    assert not stalled.requests
