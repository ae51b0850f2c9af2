"""Who waits, who goes first and who is refused when there is more work than the workers can do."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest

from core.errors import OverloadedError
from router.placement.fair_queue import FairQueue
from router.placement.turnstile import Estimate, Turnstile
from rpc.worker_pb2 import KvBlockCounts
from support.fake_workers import FakeWorker
from support.router import Running, running
from support.virtual_time import run_virtual
from support.waiting import eventually

# ---------------------------------------------------------------- whose turn it is


def order(queue: FairQueue) -> list[str]:
    return [queue.pop().key for _ in range(len(queue))]


def test_keys_take_turns_whatever_one_of_them_asks_for():
    queue = FairQueue()
    for _ in range(6):
        queue.push("greedy", 0, 100)
    for _ in range(2):
        queue.push("modest", 0, 100)
    assert order(queue) == ["greedy", "modest", "greedy", "modest", *["greedy"] * 4]


def test_turns_are_by_work_not_by_number():
    queue = FairQueue()
    for _ in range(3):
        queue.push("long", 0, 400)
    for _ in range(8):
        queue.push("short", 0, 100)
    assert order(queue)[:8] == [
        "long",
        "short",
        "short",
        "short",
        "short",
        "long",
        "short",
        "short",
    ]


def test_priority_and_then_arrival_decide_within_a_key_alone():
    queue = FairQueue()
    names = {}
    for name, key, priority in (
        ("a1", "a", 0), ("a2", "a", 5), ("a3", "a", -1), ("a4", "a", 0), ("b1", "b", 99),
    ):  # fmt: skip
        names[queue.push(key, priority, 10)] = name
    assert [names[queue.pop()] for _ in range(5)] == ["a3", "b1", "a1", "a4", "a2"]


def test_a_key_that_was_away_has_saved_nothing_up():
    queue = FairQueue()
    for _ in range(10):
        queue.push("busy", 0, 100)
        queue.pop()
    for _ in range(3):
        queue.push("new", 0, 100)
    queue.push("busy", 0, 100)
    # The one that just had its turn is behind by that one, not by all ten.
    assert order(queue) == ["new", "new", "busy", "new"]


def test_leaving_forgets_the_work_and_nothing_else():
    queue = FairQueue()
    tickets = [queue.push("a", 0, 10) for _ in range(3)]
    other = queue.push("b", 0, 10)
    queue.remove(tickets[0])
    queue.remove(tickets[0])
    assert len(queue) == 3 and queue.work_before("a", 0) == 30
    assert [queue.pop() for _ in range(3)] == [tickets[1], other, tickets[2]]
    queue.remove(other)
    with pytest.raises(IndexError):
        queue.pop()


def test_work_before_is_what_is_given_out_first():
    dice = random.Random(5)
    queue = FairQueue()
    for _ in range(300):
        if len(queue) and dice.random() < 0.4:
            queue.pop()
        else:
            queue.push(dice.choice("abc"), dice.randint(0, 2), dice.randint(1, 20))
    predicted = queue.work_before("a", 1)
    ticket = queue.push("a", 1, 10)
    before = 0.0
    while (popped := queue.pop()) is not ticket:
        before += popped.work
    # Each other key may be in the middle of a request of at most 20.
    assert abs(before - predicted) <= 2 * 20


def test_the_memory_of_keys_is_bounded():
    queue = FairQueue()
    for number in range(5000):
        queue.push(str(number), 0, 1 + number % 7)
        if number % 3:
            queue.pop()
    while len(queue):
        queue.pop()
    assert len(queue._idle) <= 1024 and not queue._lanes


# ---------------------------------------------------------------- in virtual time


@dataclass
class Cluster:
    """Workers as a turnstile sees them: one queue of prompts in seconds, and seats."""

    prefill_s: float  # of one request
    decode_s: float
    seats: int
    ahead_s: float = 0.1
    free_at: float = 0.0
    running: int = 0
    most_running: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(3))
    turnstile: Turnstile = field(init=False)

    def has_room(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self.running < self.seats and self.free_at - now <= self.ahead_s

    def estimate(self) -> Estimate:
        now = asyncio.get_running_loop().time()
        return Estimate(max(0.0, self.free_at - now), self.prefill_s)

    async def serve(self, key: str, priority: int = 0) -> float:
        """Seconds to the first token."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        async with self.turnstile.turn(key, priority, 100, self.estimate) as waited:
            self.turnstile.check(waited, self.estimate())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            self.free_at = max(self.free_at, loop.time()) + self.prefill_s
            await asyncio.sleep(self.free_at - loop.time())
            ttft = loop.time() - arrived
            await asyncio.sleep(self.decode_s * self.dice.uniform(0.5, 1.5))
            return ttft
        finally:
            self.running -= 1
            self.turnstile.wake()


@dataclass
class Tally:
    good: Counter = field(default_factory=Counter)
    late: int = 0
    refused: int = 0
    left: int = 0
    longest_queue: int = 0
    retry_after: list[float] = field(default_factory=list)


async def offer(cluster: Cluster, per_s: float, seconds: float, slo_s: float) -> Tally:
    """Open loop: ten keys, one of which sends half of everything; some clients leave early."""
    tally, dice = Tally(), random.Random(2)

    async def one(key: str) -> None:
        patience = 0.3 if dice.random() < 0.05 else 1000.0
        try:
            async with asyncio.timeout(patience):
                ttft = await cluster.serve(key)
        except OverloadedError as error:
            tally.refused += 1
            tally.retry_after.append(error.retry_after_s)
            return
        except TimeoutError:
            tally.left += 1
            return
        if ttft <= slo_s:
            tally.good[key] += 1
        else:
            tally.late += 1

    tasks = set()
    loop = asyncio.get_running_loop()
    while loop.time() < seconds:
        key = "greedy" if dice.random() < 0.5 else str(dice.randrange(9))
        task = asyncio.create_task(one(key))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        tally.longest_queue = max(tally.longest_queue, len(cluster.turnstile))
        await asyncio.sleep(dice.expovariate(per_s))
    await asyncio.gather(*tasks)
    return tally


@pytest.mark.parametrize("bound", ["prefill", "decode"])
def test_at_ten_times_capacity_goodput_stays_and_the_queue_is_flat(bound):
    """V53: capacity is 20 requests a second either way; 200 come, for 40 seconds."""

    async def main() -> None:
        prefill_s, decode_s = (0.05, 0.5) if bound == "prefill" else (0.002, 0.998)
        cluster = Cluster(prefill_s, decode_s, seats=20)
        cluster.turnstile = Turnstile(cluster, limit=200, slo_ttft_s=1.0)
        tally = await offer(cluster, per_s=200, seconds=40, slo_s=1.0)
        good = sum(tally.good.values())
        assert good >= 0.9 * 20 * 40, (good, tally.late, tally.refused)
        assert tally.late <= 0.02 * good
        assert tally.refused > 0.8 * 9 * 20 * 40
        # No longer than what is served within the SLO, and the first instants' surprise.
        assert tally.longest_queue < 80
        assert min(tally.retry_after) >= 1 and max(tally.retry_after) <= 60
        # Half of the load is one key's, and it gets its tenth of what is served.
        shares = [count / good for count in tally.good.values()]
        assert len(shares) == 10 and max(shares) < 0.15 and min(shares) > 0.05
        assert not len(cluster.turnstile) and not cluster.turnstile._waiters
        await asyncio.sleep(1)
        assert cluster.turnstile._pump is None and cluster.running == 0

    run_virtual(main())


def test_below_capacity_nobody_is_refused_or_late():
    async def main() -> None:
        cluster = Cluster(0.05, 0.3, seats=20)
        cluster.turnstile = Turnstile(cluster, limit=200, slo_ttft_s=2.0)
        tally = await offer(cluster, per_s=14, seconds=60, slo_s=2.0)
        assert tally.refused == tally.late == 0

    run_virtual(main())


def test_without_an_slo_the_queue_is_bounded_and_so_is_the_wait():
    async def main() -> None:
        cluster = Cluster(0.05, 0.5, seats=0)  # never any room
        cluster.turnstile = Turnstile(cluster, limit=5)
        tasks = [asyncio.create_task(cluster.serve("a")) for _ in range(8)]
        await asyncio.sleep(1)
        assert len(cluster.turnstile) == 5
        assert sum(task.done() for task in tasks) == 3
        await asyncio.sleep(60)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, OverloadedError) for answer in answers)
        assert not len(cluster.turnstile) and not cluster.turnstile._waiters
        await cluster.turnstile.close()

    run_virtual(main())


def test_a_prompt_longer_than_the_slo_is_served_when_nobody_is_in_its_way():
    async def main() -> None:
        cluster = Cluster(5.0, 0.1, seats=20)
        cluster.turnstile = Turnstile(cluster, limit=5, slo_ttft_s=1.0)
        assert await cluster.serve("a") == pytest.approx(5.0)
        first = asyncio.create_task(cluster.serve("a"))
        await asyncio.sleep(1)
        with pytest.raises(OverloadedError, match="promises"):
            await cluster.serve("a")
        await first

    run_virtual(main())


# ---------------------------------------------------------------- in a router


def small(worker: FakeWorker) -> None:
    """A batch of four, and one ahead of it."""
    worker.max_num_seqs = 4


async def fill(router: Running) -> tuple[asyncio.Semaphore, list[asyncio.Task]]:
    """As many requests as the only decode worker takes, all of them held up there."""
    gate = router.worker("decode-0").gate = asyncio.Semaphore(0)
    tasks = [ask(router, f"first {i}") for i in range(5)]
    await eventually(lambda: router.worker("decode-0").active == 5)
    return gate, tasks


def ask(router: Running, prompt: str, headers: dict | None = None, **fields) -> asyncio.Task:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    post = router.http.post("/v1/completions", json=body, headers=headers)
    return asyncio.create_task(post)


def waiting(router: Running) -> int:
    return len(router.server.frontend.pipeline._turnstile)


def served(router: Running) -> list[str]:
    return [bytes(r.prompt_token_ids).decode() for r in router.worker("decode-0").requests]


async def test_users_take_turns_and_priority_decides_within_one():
    async with running(prepare=small) as router:
        gate, tasks = await fill(router)
        for prompt, fields in (
            ("a late", {"user": "a", "priority": 7}),
            ("a 1", {"user": "a"}),
            ("a 2", {"user": "a"}),
            ("a early", {"user": "a", "priority": -7}),
            ("b 1", {"user": "b"}),
        ):
            tasks.append(ask(router, prompt, **fields))
            await eventually(lambda n=len(tasks): waiting(router) == n - 5)
        gauge = "pdserve_router_requests_queued 5.0"
        assert gauge in (await router.http.get("/metrics")).text
        for num_served in range(6, 11):  # one ends, one comes
            gate.release()
            await eventually(lambda n=num_served: len(served(router)) == n)
        for _ in range(5):
            gate.release()
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200] * 10
        assert served(router)[5:] == ["a early", "b 1", "a 1", "a 2", "a late"]
        assert waiting(router) == 0
        await router.idle()


async def test_requests_wait_here_while_the_workers_have_enough(router):
    prefill, decode = router.worker("prefill-0"), router.worker("decode-0")

    async def waits_until(worker: FakeWorker, busy: dict, idle: dict, blocks: int = 0) -> None:
        worker.status.kv_blocks.CopyFrom(KvBlockCounts(total=256, free=256 - blocks, held=blocks))
        worker.report(**busy)
        ours = router.server.registry.workers[worker.id]
        await eventually(lambda: ours.status == worker.status)
        task = ask(router, "hello")
        await eventually(lambda: waiting(router) == 1)
        await asyncio.sleep(0.15)  # it looks again by itself
        assert waiting(router) == 1 and not task.done()
        worker.status.kv_blocks.CopyFrom(KvBlockCounts(total=256, free=256))
        worker.report(**idle)
        assert (await task).status_code == 200

    idle = {"requests_running": 0, "waiting_prefill_tokens": 0}
    # Two seconds of prompts, at the speed that is guessed before one is measured.
    await waits_until(prefill, {"requests_running": 2, "waiting_prefill_tokens": 4000}, idle)
    # No block is free, and a batch that is full with those that wait for their turn in it.
    await waits_until(decode, {"requests_running": 3}, idle, blocks=256)
    await waits_until(decode, {"requests_running": 70, "requests_waiting": 10}, {
        "requests_running": 60, "requests_waiting": 0,
    })  # fmt: skip


async def test_clients_that_leave_the_queue_are_never_placed():
    async with running(prepare=small) as router:
        gate, tasks = await fill(router)
        leaving = [ask(router, f"gone {i}", stream=bool(i % 2)) for i in range(6)]
        staying = ask(router, "stays")
        await eventually(lambda: waiting(router) == 7)
        for task in leaving:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await eventually(lambda: waiting(router) == 1)
        for _ in range(6):
            gate.release()
        await asyncio.gather(*tasks, staying)
        assert served(router)[5:] == ["stays"]
        await router.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after_before_the_first_byte(stream):
    async with running("router.max_queued_requests=1", prepare=small) as router:
        gate, tasks = await fill(router)
        tasks.append(ask(router, "waits"))
        await eventually(lambda: waiting(router) == 1)
        refused = await router.post(prompt="too many", max_tokens=2, stream=stream)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        rejections = 'pdserve_rejections_total{reason="overloaded"} 1.0'
        assert rejections in (await router.http.get("/metrics")).text
        for _ in tasks:
            gate.release()
        await asyncio.gather(*tasks)


async def test_a_predicted_ttft_past_the_slo_is_429_and_never_reaches_a_worker():
    async with running("router.slo.ttft=2", prefills=1) as router:
        prefill = router.worker("prefill-0")
        ours = router.server.registry.workers["prefill-0"]
        # 1000 tokens/s, measured, and six seconds of work.
        prefill.report(
            prefill_tokens_per_second=1000.0, waiting_prefill_tokens=6000, requests_running=3
        )
        await eventually(lambda: ours.prefill_speed == 1000.0)
        refused = await router.post(prompt="hello", max_tokens=2)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert not prefill.requests
        # Nobody is refused by a guess.
        prefill.report(prefill_tokens_per_second=0.0, waiting_prefill_tokens=100)
        await eventually(lambda: ours.prefill_speed is None)
        assert (await router.post(prompt="hello", max_tokens=2)).status_code == 200


async def test_requests_that_wait_end_when_the_router_stops():
    async with running(prepare=small) as router:
        gate, tasks = await fill(router)
        tasks.append(ask(router, "waits"))
        await eventually(lambda: waiting(router) == 1)
        await router.server.close(grace_s=0.1)
        statuses = Counter()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            statuses[answer.status_code if isinstance(answer, httpx.Response) else "cut"] += 1
        assert statuses == {503: 6}
        assert not router.worker("decode-0").active
