"""The controller's autoscaler in simulated deployments: it holds the SLO, does not flap, and costs
about what the best fixed size would have cost."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from core.config import AutoscaleConfig
from planner.batch_worker import Limits
from planner.deployment import Link
from planner.layout import Layout, Pool
from planner.result import Result, Slo
from planner.simulate import Machine, Options, run
from planner.step_model import FittedModel
from planner.trace import TraceRequest

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
SECONDS = 1200


def flat(at_s: float) -> float:
    return 12


def waves(at_s: float) -> float:
    return 6 + 14 * (0.5 - 0.5 * math.cos(2 * math.pi * at_s / 900))


def trace(rate: Callable[[float], float]) -> list[TraceRequest]:
    """Random arrivals at a changing rate, lengths from log-normal distributions."""
    dice, now, requests = random.Random(7), 0.0, []
    top = max(rate(second) for second in range(SECONDS))
    while True:
        now += dice.expovariate(top)
        if now > SECONDS:
            return requests
        if dice.random() < rate(now) / top:
            prompt = min(6000, max(16, int(dice.lognormvariate(6.8, 0.6))))
            output = min(400, max(1, int(dice.lognormvariate(4.6, 0.6))))
            requests.append(TraceRequest(now, prompt, output))


def simulated(
    requests: list[TraceRequest], prefill: int, decode: int, scales: bool = False
) -> Result:
    options = Options(autoscale=AUTOSCALE if scales else {})
    return run(Layout(Pool(prefill), Pool(decode)), MACHINE, requests, 0, options)


# The least fixed sizes that meet the SLO for nine of ten requests, which is what p90 says.
# A flat load leaves nothing to win: one worker too many, of 7, is what caution costs.
@pytest.mark.parametrize(
    ("rate", "best", "most"), [(flat, (4, 3), 1 + 1.2 / 7), (waves, (6, 4), 1.0)]
)
def test_it_holds_the_slo_at_about_the_cost_of_the_best_fixed_size(
    rate: Callable[[float], float], best: tuple[int, int], most: float
) -> None:
    requests, (prefill, decode) = trace(rate), best
    fixed = simulated(requests, prefill, decode)
    assert fixed.attainment(SLO) >= 0.9
    assert simulated(requests, prefill - 1, decode).attainment(SLO) < 0.9
    assert simulated(requests, prefill, decode - 1).attainment(SLO) < 0.9
    scaled = simulated(requests, 4, 4, scales=True)
    assert scaled.recorder.num_finished == len(requests)
    assert scaled.attainment(SLO) >= 0.9
    cost = sum(scaled.worker_seconds.values()) / sum(fixed.worker_seconds.values())
    assert cost <= most


def test_it_does_not_flap() -> None:
    for rate, most in ((flat, 2), (waves, 4)):
        for sizes in simulated(trace(rate), 4, 4, scales=True).sizes.values():
            steps = [after - before for (_, before), (_, after) in pairwise(sizes)]
            turns = sum(one * other < 0 for one, other in pairwise(steps))
            assert turns <= most, sizes


def test_a_burst_is_answered_and_given_back() -> None:
    requests = trace(lambda at: 20 if 400 < at < 700 else 8)
    result = simulated(requests, 3, 3, scales=True)
    assert result.recorder.num_finished == len(requests)
    for name, sizes in result.sizes.items():
        during = max(size for start, size in sizes if start < 700)
        assert during > 3, name
        assert sizes[-1][1] <= during // 2, name
        # The first step up comes within seconds.
        assert min(start for start, size in sizes if size > 3) < 430
