"""The controller's autoscaler in simulated deployments: it holds the SLO, does not flap, and costs
about what the best fixed size would have cost."""

import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from core.config import AutoscaleConfig
from planner.autoscaled import Bounds, as_dict, as_text, study
from planner.batch_worker import Limits
from planner.deployment import Link
from planner.layout import Layout, Pool
from planner.result import Result, Slo
from planner.search import Goal
from planner.simulate import Machine, Options, run
from planner.step_model import FittedModel
from planner.trace import Trace, TraceRequest, load_trace

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"

# 4 prompt tokens a millisecond; a decode step takes 20 ms and 1 ms for each sequence.
MODEL = FittedModel(5, 0.25, 0, 20, 1.0, 0.00005)
MACHINE = Machine(
    lambda name, tp: MODEL, lambda name, tp: Limits(60000, 64), lambda tp: Link(5e9, 0.002, 1e5)
)
SLO = Slo(ttft=2.0, tpot=0.06)
AUTOSCALE = {
    "prefill": AutoscaleConfig(min=1, max=24, ttft_p90=SLO.ttft),
    "decode": AutoscaleConfig(min=1, max=24, tpot_p90=SLO.tpot),
}


def flat(rate: float) -> Callable[[float], float]:
    return lambda at_s: rate


def waves(at_s: float) -> float:
    return 6 + 14 * (0.5 - 0.5 * math.cos(2 * math.pi * at_s / 900))


def falling(at_s: float) -> float:
    return 16 - 14 * at_s / 3600


def trace(rate: Callable[[float], float], seconds: int = 1200) -> list[TraceRequest]:
    """Random arrivals at a changing rate, lengths from log-normal distributions."""
    dice, now, requests = random.Random(7), 0.0, []
    top = max(rate(second) for second in range(seconds))
    while True:
        now += dice.expovariate(top)
        if now > seconds:
            return requests
        if dice.random() < rate(now) / top:
            prompt = min(6000, max(16, int(dice.lognormvariate(6.8, 0.6))))
            output = min(400, max(1, int(dice.lognormvariate(4.6, 0.6))))
            requests.append(TraceRequest(now, prompt, output))


def recorded(name: str) -> list[TraceRequest]:
    path = TRACES / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    return list(load_trace(path).requests)


def simulated(
    requests: list[TraceRequest],
    prefill: int,
    decode: int,
    scales: bool = False,
    switches: bool = False,
) -> Result:
    """With the router's queue, which holds back what the workers have no room for."""
    options = Options(autoscale=AUTOSCALE if scales else {}, switches=switches, holds_back=True)
    return run(Layout(Pool(prefill), Pool(decode)), MACHINE, requests, 0, options)


def cost(result: Result) -> float:
    return sum(result.worker_seconds.values())


def turns(result: Result) -> int:
    """Changes of direction, of all pools."""
    total = 0
    for sizes in result.sizes.values():
        steps = [after - before for (_, before), (_, after) in pairwise(sizes)]
        total += sum(one * other < 0 for one, other in pairwise(steps))
    return total


def check_row(
    requests: list[TraceRequest], best: tuple[int, int], most_cost: float, most_turns: int
) -> None:
    """`best`: the least fixed sizes that meet the SLO for nine of ten requests, which is what p90
    says. `most_turns` an hour."""
    fixed = simulated(requests, *best)
    assert fixed.attainment(SLO) >= 0.9
    scaled = simulated(requests, *best, scales=True)
    assert scaled.recorder.num_finished == len(requests)
    assert scaled.attainment(SLO) >= 0.9
    assert cost(scaled) <= most_cost * cost(fixed)
    assert turns(scaled) <= most_turns * scaled.duration / 3600, scaled.sizes


# One worker too many, of 4, for as long as nobody knows: a quarter. Waves turn eight times an
# hour in each pool by themselves.
@pytest.mark.parametrize(
    ("rate", "best", "most_cost", "most_turns"),
    [
        (flat(6), (2, 2), 1.15, 6),
        (flat(13), (4, 3), 1.06, 3),
        (waves, (6, 4), 1.1, 16),
    ],
)
def test_it_holds_the_slo_at_about_the_cost_of_the_best_fixed_size(
    rate: Callable[[float], float], best: tuple[int, int], most_cost: float, most_turns: int
) -> None:
    requests, (prefill, decode) = trace(rate), best
    few = requests[: len(requests) // 2]
    assert simulated(few, prefill - 1, decode).attainment(SLO) < 0.9
    assert simulated(few, prefill, decode - 1).attainment(SLO) < 0.9
    check_row(requests, best, most_cost, most_turns)


@pytest.mark.parametrize(
    ("name", "best", "most_cost", "most_turns"),
    [("azure2023_conv", (3, 3), 1.06, 4), ("azure2023_code", (11, 2), 1.12, 10)],
)
def test_a_real_trace_costs_at_most_a_little_more_than_hindsight(
    name: str, best: tuple[int, int], most_cost: float, most_turns: int
) -> None:
    """Hours of Azure's services in 2023. The code trace is bursts of seconds, shorter than a
    start: what they missed is remembered."""
    check_row(recorded(name), best, most_cost, most_turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "best", "most_cost", "most_turns"),
    [
        (flat(6), (2, 2), 1.15, 6),
        (flat(12), (4, 3), 1.05, 3),
        (flat(13), (4, 3), 1.05, 6),
        (flat(17), (5, 4), 1.15, 3),
        (waves, (6, 4), 1.1, 16),
        (falling, (5, 4), 0.8, 2),
    ],
)
def test_an_hour(
    rate: Callable[[float], float], best: tuple[int, int], most_cost: float, most_turns: int
) -> None:
    """`make test-autoscaling`."""
    check_row(trace(rate, 3600), best, most_cost, most_turns)


def test_a_burst_is_answered_and_given_back() -> None:
    requests = trace(lambda at: (20 if 400 < at < 600 else 8) if at < 700 else 1, 2900)
    result = simulated(requests, 3, 3, scales=True)
    assert result.recorder.num_finished == len(requests)
    for name, sizes in result.sizes.items():
        during = max(size for start, size in sizes if start < 700)
        assert during > 3, name
        # More than a tenth of half an hour's prompts were late: so long it is remembered.
        assert sizes[-1][1] <= during // 4, name
    # The first step up comes within seconds; decode gets more when prefill does.
    first = {n: min(at for at, size in sizes if size > 3) for n, sizes in result.sizes.items()}
    assert first["prefill"] < 410 and first["decode"] < 450


def test_what_waits_in_the_router_is_seen() -> None:
    """One decode worker is full: prompts wait in the router, though prefill has nothing to do."""
    dice, now, requests = random.Random(5), 0.0, []
    while now < 240:
        now += dice.expovariate(8)
        requests.append(TraceRequest(now, 64, 300))
    result = simulated(requests, 2, 1, scales=True)
    assert max(size for _, size in result.sizes["decode"]) >= 4
    assert max(size for _, size in result.sizes["prefill"]) == 2


def shifting(seconds: float) -> list[TraceRequest]:
    """Every five minutes long prompts and short answers turn into the opposite, or back."""
    dice, now, requests = random.Random(5), 0.0, []
    while now < seconds:
        now += dice.expovariate(10)
        prompt, output = (2000, 40) if now // 300 % 2 else (300, 250)
        requests.append(
            TraceRequest(now, int(prompt * dice.uniform(0.7, 1.3)),
                         int(output * dice.uniform(0.7, 1.3)))
        )  # fmt: skip
    return requests


def test_workers_that_may_change_their_role_follow_a_changing_ratio_with_fewer_starts() -> None:
    requests = shifting(1500)
    stay, move = (simulated(requests, 3, 4, True, switches) for switches in (False, True))
    for result in (stay, move):
        assert result.recorder.num_finished == len(requests)
    assert not any(stay.num_switched.values())
    assert all(move.num_switched.values())
    assert sum(move.num_started.values()) < sum(stay.num_started.values())
    # What has moved away has to come back.
    assert move.attainment(SLO) >= stay.attainment(SLO) - 0.03
    assert cost(move) <= 0.95 * cost(stay)


def test_a_study_finds_the_least_fixed_size_and_what_following_costs() -> None:
    few = Trace(tuple(trace(flat(12))[:1500]))
    start, goal = Layout(Pool(1), Pool(1)), Goal(SLO)
    result = study(start, MACHINE, few, goal, Bounds(1, 8), Options(switches=True, holds_back=True))
    assert result.fixed is not None and result.fixed.prefill and result.fixed.decode
    prefill, decode = result.fixed.prefill.replicas, result.fixed.decode.replicas
    for sizes, holds in (((0, 0), True), ((1, 0), False), ((0, 1), False)):
        size = prefill - sizes[0], decode - sizes[1]
        assert (simulated(list(few.requests), *size).attainment(SLO) >= 0.9) == holds
    report = as_dict(result, goal, cost_per_gpu_hour=2.0)
    assert report["scaled"]["cost"] == pytest.approx(2 * report["scaled"]["gpu_hours"])
    assert report["cost_ratio"] == pytest.approx(
        sum(result.scaled.worker_seconds.values()) / (result.scaled.duration * (prefill + decode)),
        rel=0.1,
    )
    text = as_text(report)
    assert "Autoscaled, 1 to 8 workers a pool" in text and "times as much" in text


def test_a_goal_that_no_size_meets_is_said() -> None:
    few = Trace(tuple(trace(flat(12))[:600]))
    start, goal = Layout(Pool(1), Pool(1)), Goal(SLO)
    result = study(start, MACHINE, few, goal, Bounds(1, 2), Options(holds_back=True))
    assert result.fixed is None
    text = as_text(as_dict(result, goal, None))
    assert "No fixed size of at most 2 workers a pool meets the goal" in text
