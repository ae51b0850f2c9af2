"""What the policy makes of load over time, and of prompts that a decode worker could compute."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from core.block_hash import block_hashes
from planner.prefix_cache import PrefixCache
from router.placement.policy import POLICIES, Demand, Load, Speeds, best_worker
from support.fake_answers import BLOCK_SIZE, answer_text
from support.fake_workers import Fault
from support.router import Running, running
from support.waiting import eventually

# ---------------------------------------------------------------- hot prefixes, simulated


@dataclass(eq=False)
class Server:
    """A prefill worker: first come, first served, with a prefix cache of blocks of 16."""

    speed: float
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(4096))
    free_at: float = 0.0
    busy_s: float = 0.0
    num_requests: int = 0
    last_chosen: int = 0

    def load(self, now: float, hashes: list[bytes]) -> Load:
        return Load(
            queued_tokens=int(max(0.0, self.free_at - now) * self.speed),
            num_requests=0,
            free_blocks=1000,
            total_blocks=1000,
            max_num_seqs=64,
            cached_tokens=16 * self.cache.match(hashes),
            last_chosen=self.last_chosen,
            speeds=Speeds(self.speed, 0.02, 0.001),
        )


def drive(servers: list[Server], requests: Iterator[tuple[float, int, list[bytes]]]) -> float:
    """Places every request by kv_aware; returns the share of prompt tokens that were hits."""
    hits = total = 0
    for number, (now, num_tokens, hashes) in enumerate(requests, start=1):
        loads = [(server, server.load(now, hashes)) for server in servers]
        demand = Demand(num_tokens, 128, 16)
        best = best_worker(loads, POLICIES["kv_aware"].prefill, demand)
        server = best.worker
        seconds = (num_tokens - best.load.cached_tokens) / server.speed
        server.free_at = max(server.free_at, now) + seconds
        server.busy_s += seconds
        server.num_requests += 1
        server.last_chosen = number
        server.cache.add(hashes)
        hits += best.load.cached_tokens
        total += num_tokens
    return hits / total


def traffic(
    count: int, per_s: float, prefixes: list[float], prefix_tokens: int = 2048
) -> Iterator[tuple[float, int, list[bytes]]]:
    """Each request begins with one of the prefixes, by these weights, or, for the rest of 1, with
    something new of the same length; 200 new tokens follow."""
    dice, now = random.Random(7), 0.0
    known = [block_hashes([1 + index] * prefix_tokens, 16) for index in range(len(prefixes))]
    for number in range(count):
        now += dice.expovariate(per_s)
        chosen = dice.choices([*range(len(prefixes)), None], [*prefixes, 1 - sum(prefixes)])[0]
        if chosen is None:
            hashes = block_hashes([1000 + number] * prefix_tokens, 16)
        else:
            hashes = known[chosen]
        yield now, prefix_tokens + 200, hashes


def best_hits(count: int, prefixes: list[float], prefix_tokens: int = 2048) -> float:
    """The share if every prefix were computed once in all and never again."""
    seen: set[bytes] = set()
    hits = total = 0
    for _, num_tokens, hashes in traffic(count, 1.0, prefixes, prefix_tokens):
        hits += prefix_tokens if hashes[-1] in seen else 0
        seen.add(hashes[-1])
        total += num_tokens
    return hits / total


def imbalance(servers: list[Server]) -> float:
    """Seconds of work of the busiest server over the mean."""
    return max(s.busy_s for s in servers) * len(servers) / sum(s.busy_s for s in servers)


@pytest.mark.parametrize(
    ("prefixes", "per_s"),
    [
        ([0.9], 120),  # V48: nine of ten requests begin alike
        ([0.99], 250),
        ([0.4, 0.2, 0.1, 0.1], 60),
        ([0.02] * 40, 50),
    ],
    ids=["one hot", "one very hot", "a few", "many"],
)
def test_hot_prefixes_hit_and_the_load_stays_balanced(prefixes, per_s):
    servers = [Server(10_000.0) for _ in range(8)]
    hit_rate = drive(servers, traffic(3000, per_s, prefixes))
    assert hit_rate > 0.9 * best_hits(3000, prefixes)
    assert imbalance(servers) < 2
    assert max(s.free_at for s in servers) < 3000 / per_s + 5, "it keeps up"


def test_a_slow_worker_gets_its_share_of_a_hot_prefix_and_no_more():
    """V48: one worker is ten times slower; it was the first to have the prefix."""
    servers = [Server(1_000.0), *(Server(10_000.0) for _ in range(7))]
    servers[0].cache.add(block_hashes([1] * 2048, 16))
    hit_rate = drive(servers, traffic(3000, 100, [0.9]))
    assert hit_rate > 0.9 * best_hits(3000, [0.9])
    assert imbalance(servers) < 2
    assert servers[0].num_requests < 0.05 * 3000


def test_unique_prompts_spread_evenly():
    servers = [Server(10_000.0) for _ in range(8)]
    drive(servers, traffic(2000, 25, []))
    assert imbalance(servers) < 1.2


# ---------------------------------------------------------------- prefill on D itself

TEXT = answer_text("hello", 4)
LOCAL = "router.max_local_prefill_tokens=32"


async def decisions(router: Running) -> dict[str, float]:
    found = {}
    for line in (await router.http.get("/metrics")).text.splitlines():
        if line.startswith("pdserve_decisions_total{"):
            name, _, value = line.partition(" ")
            found[name.split('"')[1]] = float(value)
    return found


async def test_a_short_prompt_is_computed_where_it_is_decoded():
    async with running(LOCAL) as router:
        answer = await router.complete("hello", max_tokens=4)
        assert answer["choices"][0]["text"] == TEXT
        assert not router.worker("prefill-0").requests
        answer = await router.complete("hello " * 20, max_tokens=4)
        assert answer["choices"][0]["text"] == answer_text("hello " * 20, 4)
        assert len(router.worker("prefill-0").requests) == 1
        assert await decisions(router) == {"local": 1, "disaggregated": 1}
        text = (await router.http.get("/metrics")).text
        first = 'pdserve_worker_time_to_first_token_seconds_count{role="%s",worker="%s-0"} 1.0'
        assert first % ("decode", "decode") in text and first % ("prefill", "prefill") in text
        await router.idle()


async def test_it_is_never_done_unless_asked_for():
    async with running() as router:
        await router.complete("hello", max_tokens=4)
        assert await decisions(router) == {"disaggregated": 1}


async def test_what_counts_is_what_the_decode_worker_has_not_cached():
    """The second turn of a conversation: D has all but the last words."""
    async with running(LOCAL) as router:
        first = [1 + i % 90 for i in range(160)]
        await router.complete(first, max_tokens=2)
        assert await decisions(router) == {"disaggregated": 1}
        router.worker("decode-0").store(block_hashes(first, BLOCK_SIZE))
        await router.synced()
        usage = (await router.complete([*first, *range(1, 20)], max_tokens=2))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 160
        assert await decisions(router) == {"disaggregated": 1, "local": 1}


async def test_running_streams_are_not_slowed_down_for_it():
    async with running(LOCAL) as router:
        decode = router.worker("decode-0")
        # 100 tokens a second: 50 ms for the prompt, times what runs there.
        decode.report(prefill_tokens_per_second=100.0, requests_running=20)
        prefill = router.worker("prefill-0")
        prefill.report(prefill_tokens_per_second=10_000.0)
        ours = router.server.registry.workers
        await eventually(lambda: ours["decode-0"].prefill_speed is not None)
        await eventually(lambda: ours["prefill-0"].prefill_speed is not None)
        await router.complete("hello", max_tokens=4)
        assert await decisions(router) == {"disaggregated": 1}


async def test_local_prompts_do_not_pile_up_on_a_decode_worker():
    """The bound is on all prompt tokens that wait there, not on each request's."""
    async with running(LOCAL) as router:
        decode, prefill = router.worker("decode-0"), router.worker("prefill-0")
        gate = decode.gate = prefill.gate = asyncio.Semaphore(0)
        prefill.report(waiting_prefill_tokens=900)  # waiting there would take longer
        ours = router.server.registry.workers["prefill-0"]
        await eventually(lambda: ours.status.waiting_prefill_tokens == 900)
        prompt = "x" * 15
        tasks = [asyncio.create_task(router.complete(prompt, max_tokens=2)) for _ in range(3)]
        await eventually(lambda: decode.active + prefill.active == 4)
        assert len(prefill.requests) == 1
        for _ in range(20):
            gate.release()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("after", [0, 2])
async def test_a_local_attempt_that_fails_is_made_again(after):
    async with running(LOCAL, decodes=2) as router:
        faults = iter([Fault("cut", after)])
        for name in ("decode-0", "decode-1"):
            router.worker(name).next_fault = lambda: next(faults, None)
        answer = await router.complete("hello", max_tokens=4)
        assert answer["choices"][0]["text"] == TEXT
        requests = [r for n in (0, 1) for r in router.worker(f"decode-{n}").requests]
        # The end of the call may overtake the tokens before it, which are then made again.
        first, second = sorted(len(r.output_token_ids) for r in requests)
        assert first == 0 and second <= after
        await router.idle()


async def test_a_session_stays_with_its_workers_whatever_their_load():
    async with running("router.policy=session", prefills=4, decodes=4) as router:

        def used() -> dict[str, int]:
            return {w.id: len(w.requests) for w in router.cluster.workers.values() if w.requests}

        for turn in range(5):
            body = {"model": "fake", "prompt": f"turn {turn}", "max_tokens": 2}
            headers = {"x-session-id": "a"}
            response = await router.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
        assert sorted(used().values()) == [5, 5]
        for turn in range(5):
            await router.complete(f"turn {turn}", max_tokens=2, user="a")
        assert sorted(used().values()) == [10, 10], "the same name is the same session"
        for number in range(20):
            await router.complete("hello", max_tokens=2, user=f"user {number}")
        assert len(used()) > 5
