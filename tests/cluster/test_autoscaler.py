"""Decisions of one pool's autoscaler, in invented time; and that the controller acts on them."""

import asyncio
from dataclasses import replace

import pytest

from cluster.autoscaler import Autoscaler, Decision, PoolLoad, RouterQueue, WorkerLoad
from cluster.autoscaling import Autoscaling
from cluster.changes import changes_between
from core.config import AutoscaleConfig, Config, parse_config
from core.errors import ConfigError, OverloadedError, RequestError

IDLE = WorkerLoad(0, 0, 0, 0.0, 16, 1000.0, 0.02, 0.001)
BOUNDS = AutoscaleConfig(min=1, max=8, ttft_p90=2.0, tpot_p90=0.03)


def pool(count: int, tokens: int = 0, **changes: float) -> PoolLoad:
    """Of 2 seconds; each prompt has 500 tokens."""
    return PoolLoad([replace(IDLE, **changes)] * count, 2.0, tokens, tokens // 500)


def prefill(config: AutoscaleConfig = BOUNDS) -> Autoscaler:
    return Autoscaler(config, has_prefill=True, has_decode=False)


def watched(scaler: Autoscaler, count: int, tokens: int) -> Autoscaler:
    """After the first moments, which do not count: until 30 s were looked at."""
    for look in range(14):
        assert scaler.decide(2.0 * look, count, pool(count, tokens)).replicas == count
    return scaler


def decode(config: AutoscaleConfig = BOUNDS) -> Autoscaler:
    return Autoscaler(config, has_prefill=False, has_decode=True)


def test_prefill_follows_prompt_tokens_and_their_measured_speed() -> None:
    scaler = watched(prefill(), 3, 6000)
    # 3000 tokens/s at 1000 a worker: 3 would be full, at most 90 percent are wanted.
    decision = scaler.decide(28.0, 3, pool(3, 6000))
    assert decision.replicas == 4
    assert "3000 prompt tokens/s" in decision.reason


def test_a_tight_target_leaves_more_spare() -> None:
    # A prompt takes 0.5 s: with 0.6 s to the first token hardly any may wait.
    tight = AutoscaleConfig(min=1, max=8, ttft_p90=0.6)
    assert watched(prefill(tight), 2, 2000).decide(28.0, 2, pool(2, 2000)).replicas == 3
    assert watched(prefill(), 2, 2000).decide(28.0, 2, pool(2, 2000)).replicas == 2


def test_a_lasting_backlog_grows_the_pool_and_a_short_one_does_not() -> None:
    # 1000 tokens/s come, 2000 can be computed; 16 s of work wait all the same.
    waiting = pool(2, 2000, waiting_prefill_tokens=16_000)
    scaler = watched(prefill(), 2, 2000)
    sizes = [scaler.decide(28.0 + 2 * i, 2, waiting).replicas for i in range(8)]
    assert sizes[:2] == [2, 2] and max(sizes) == 3
    scaler = watched(prefill(), 2, 2000)
    short = pool(2, 2000, waiting_prefill_tokens=3_000)
    loads = [short, *[pool(2, 2000)] * 20]
    assert {scaler.decide(28.0 + 2 * i, 2, load).replicas for i, load in enumerate(loads)} == {2}


def test_what_waits_in_the_router_is_load_of_the_pool_that_it_waits_for() -> None:
    queue = RouterQueue(prompts=64, tokens=32_000, oldest_seconds=9.0)

    def last(scaler: Autoscaler, **worker: float) -> Decision:
        held = [replace(pool(2, 2000, **worker), queue=queue)] * 8
        looks = [scaler.decide(28.0 + 2 * i, 2, load) for i, load in enumerate(held)]
        return max(looks, key=lambda decision: decision.replicas)

    busy = last(watched(prefill(), 2, 2000), waiting_prefill_tokens=500)
    assert busy.replicas == 3 and "met too long a queue" in busy.reason
    assert last(watched(prefill(), 2, 2000)).replicas == 2  # these have nothing to do
    full, free = pool(4, requests_running=16), pool(4, requests_running=10)
    assert decode().decide(0.0, 4, full).replicas == 7
    assert decode().decide(0.0, 4, replace(full, queue=queue)).replicas == 8
    assert decode().decide(0.0, 4, replace(free, queue=queue)).replicas == 4


def test_prompts_that_take_longer_than_the_target_do_not_grow_a_pool_without_end() -> None:
    """3000 tokens at 1000 a second: no size helps them."""
    scaler, size = prefill(), 1
    for look in range(900):
        workers = [replace(IDLE, waiting_prefill_tokens=1500 if not look % 2 else 0)] * size
        size = scaler.decide(2.0 * look, size, PoolLoad(workers, 2.0, 1000, 1)).replicas
    assert size <= 3


def test_bursts_that_were_missed_are_remembered_for_half_an_hour() -> None:
    """Every minute 12 000 tokens in 2 s, to one worker that reads 1000 a second."""
    scaler, size, at, waiting, sizes = prefill(), 1, 0.0, 0.0, []

    def look(tokens: int) -> None:
        nonlocal size, at, waiting
        waiting = max(0.0, waiting + tokens - size * 2000)
        workers = [replace(IDLE, waiting_prefill_tokens=round(waiting / size))] * size
        load = PoolLoad(workers, 2.0, tokens, tokens // 500)
        size, at = scaler.decide(at, size, load).replicas, at + 2.0
        sizes.append(size)

    for index in range(600):
        look(12_000 if index % 30 == 0 else 0)
    assert max(sizes) <= 6  # 5 would read it at once
    assert min(sizes[300:]) >= 3  # and 3 with a wait of a second and a half
    while size > 1:
        look(0)
        assert at < 1200 + 1800 + 600


def test_a_backlog_waits_for_workers_that_are_on_their_way() -> None:
    scaler = prefill()
    waiting = pool(2, 2000, waiting_prefill_tokens=33_000)  # 2 ready of 4 that are wanted
    assert [scaler.decide(2.0 * i, 4, waiting).replicas for i in range(10)] == [4] * 10


@pytest.mark.parametrize(
    ("running", "kv_use", "expected"),
    # A step of 10 takes 0.03 s. 0.8 of the blocks may be used.
    [(10, 0.1, 2), (11, 0.1, 3), (20, 0.1, 4), (1, 0.81, 3), (1, 0.4, 2), (9, 1.0, 3)],
)
def test_decode_follows_running_sequences_and_blocks(
    running: int, kv_use: float, expected: int
) -> None:
    load = pool(2, requests_running=running, kv_use=kv_use)
    assert decode().decide(0.0, 2, load).replicas == expected


def test_sequences_that_wait_count_and_without_a_target_the_batch_is_the_limit() -> None:
    free = AutoscaleConfig(min=1, max=8)
    load = pool(1, requests_running=16, requests_waiting=13)
    assert decode(free).decide(0.0, 1, load).replicas == 2  # 29 at 14.4 a worker: growth by one


def test_steps_whose_time_is_all_sequences_are_measured_steps() -> None:
    """0.002 s a sequence and nothing else: 15 fit; two workers have nothing to do."""
    busy = replace(IDLE, requests_running=15, decode_step_seconds=0.0, decode_sequence_seconds=2e-3)
    idle = replace(busy, requests_running=0)
    for workers, expected in (([idle] * 2, 2), ([busy, busy, idle], 3), ([busy] * 2, 2)):
        load = PoolLoad(workers, 2.0)
        assert decode().decide(0.0, len(workers), load).replicas == expected


def test_growth_is_bounded_in_size_and_pace() -> None:
    scaler = decode()
    busy = pool(1, requests_running=16, requests_waiting=200)
    assert scaler.decide(0.0, 1, busy).replicas == 2
    assert scaler.decide(2.0, 2, pool(1, requests_running=216)).replicas == 2  # up_seconds
    assert scaler.decide(15.0, 2, pool(2, requests_running=108)).replicas == 4
    assert scaler.decide(30.0, 4, pool(4, requests_running=54)).replicas == 8
    assert scaler.decide(45.0, 8, pool(8, requests_running=54)).replicas == 8  # max


def test_a_pool_shrinks_only_after_a_quiet_while_and_not_below_half() -> None:
    scaler = decode()
    sizes = [scaler.decide(2.0 * i, 8, pool(8)).replicas for i in range(151)]
    assert sizes == [8] * 150 + [4]  # five minutes from the start, then down_seconds
    # A busy moment inside of the window keeps it.
    sizes = []
    for i in range(151, 230):
        load = pool(4, requests_running=9) if 180 <= i < 190 else pool(4)
        sizes.append(scaler.decide(2.0 * i, 4, load).replicas)
    assert sizes == [4] * len(sizes)


def test_a_burst_of_streams_is_over_and_the_least_is_reached_in_time() -> None:
    """V61: streams that have ended leave nothing behind that keeps a pool large."""
    scaler, size, at = decode(), 1, 0.0
    while at < 60:  # the burst
        load = pool(size, requests_running=40 // size, requests_waiting=100 // size)
        size, at = scaler.decide(at, size, load).replicas, at + 2.0
    assert size == 8
    halvings, idle_from = 3, at  # 8, 4, 2, 1
    while size > 1:
        size, at = scaler.decide(at, size, pool(size)).replicas, at + 2.0
        # The last minutes are forgotten, then three looks a halving.
        assert at - idle_from <= 300 + halvings * (BOUNDS.down_seconds + 6.0)


def test_a_load_that_comes_and_goes_while_workers_start_does_not_swing_the_pool() -> None:
    """V61: 2 are ready, the others still start; each busy look is followed by a quiet one."""
    scaler = decode()
    busy, quiet = pool(2, requests_running=14), pool(2)
    sizes, wanted = [], 2
    for i in range(60):
        wanted = scaler.decide(2.0 * i, wanted, quiet if i % 2 else busy).replicas
        sizes.append(wanted)
    assert sizes == sorted(sizes) and sizes[-1] <= 4, sizes


def test_bounds_hold_whatever_was_there() -> None:
    assert decode(AutoscaleConfig(min=3, max=4)).decide(0.0, 1, pool(1)).replicas >= 2
    assert decode(AutoscaleConfig(min=1, max=2)).decide(0.0, 5, pool(5)).replicas == 2


def test_a_pool_that_measured_nothing_stays() -> None:
    fresh = WorkerLoad(50, 0, 1, 0.0, 16, 0.0, 0.0, 0.0)
    assert prefill().decide(0.0, 2, PoolLoad([fresh] * 2, 2.0, 100, 1)).replicas == 2


# ------------------------------------------------------------------ in a deployment

TEXT = """
model: m
pools:
  prefill: {replicas: 5, autoscale: {min: 1, max: 3, ttft_p90: 1.0}}
"""


def test_a_file_with_wrong_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="pools.prefill.autoscale.min: expected at most max"):
        parse_config("model: m\npools: {prefill: {autoscale: {min: 3, max: 2}}}")


def test_the_size_of_a_pool_that_scales_itself_is_no_change() -> None:
    running = parse_config(TEXT.replace("5", "2"))
    assert changes_between(running, parse_config(TEXT)) == []
    wider = changes_between(running, parse_config(TEXT.replace("max: 3", "max: 9")))
    assert [(c.key, c.kind.value) for c in wider] == [("pools.prefill.autoscale", "scale")]


class FakeOperations:
    """Runs what is begun at once; busy as often as it is told to be."""

    def __init__(self, fleet: "FakeFleet", busy: int = 0) -> None:
        self.fleet, self.busy, self.asked = fleet, busy, []

    def begin(self, name, work) -> asyncio.Task:
        if self.busy:
            self.busy -= 1
            work.close()
            raise OverloadedError("a rollout is under way")
        return asyncio.create_task(work, name=name)

    async def scale(self, replicas, say, waits_for_ready) -> None:
        assert not waits_for_ready
        self.asked.append(dict(replicas))
        if replicas["prefill"] == 3:
            raise RequestError("does not fit")
        data = self.fleet.config.model_dump()
        data["pools"]["prefill"]["replicas"] = replicas["prefill"]
        self.fleet.config = Config.model_validate(data)


class FakeFleet:
    config = parse_config(TEXT.replace("5", "1"))


class FakeLoads:
    """Three workers' worth of prompts, as long as somebody looks."""

    def __init__(self) -> None:
        self.num_started = 0

    def start(self) -> None:
        self.num_started += 1

    def load(self, name: str) -> PoolLoad:
        assert name == "prefill"
        return replace(pool(1, 4000), seconds=20.0, prompt_tokens=40000)


async def test_the_controller_asks_again_after_a_person_and_survives_what_does_not_fit() -> None:
    fleet, loads = FakeFleet(), FakeLoads()
    fleet.config = parse_config(TEXT.replace("5", "1").replace("1.0", "1.0, up_seconds: 0"))
    operations = FakeOperations(fleet, busy=2)
    loop = asyncio.create_task(Autoscaling(fleet, operations, loads, period_s=0.001).run())
    async with asyncio.timeout(10):
        while operations.asked[:2] != [{"prefill": 2}, {"prefill": 3}]:
            await asyncio.sleep(0.001)
        while len(operations.asked) < 4:  # refused, and asked for again
            await asyncio.sleep(0.001)
    assert not loop.done() and operations.busy == 0 and loads.num_started
    loop.cancel()
