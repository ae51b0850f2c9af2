"""Workers that share a host, and requests that the router holds back."""

import random

import pytest

from planner.batch_worker import Limits
from planner.deployment import Link
from planner.event_loop import EventLoop
from planner.layout import Layout, Pool
from planner.result import percentile
from planner.shared_host import Pace, Slowdown
from planner.simulate import Machine, Options, simulate
from planner.step_model import FittedModel
from planner.trace import Trace, TraceRequest

# 1 ms a prompt token, 10 ms a decode step.
MODEL = FittedModel(0.0, 1.0, 0.0, 10.0, 0.0, 0.0)
PAIR = Layout(Pool(1), Pool(1))
both = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])


def machine(slowdown: Slowdown | None = None, dispatch_s: float = 0.0, **limits: int) -> Machine:
    return Machine(
        model_of=lambda _, __: MODEL,
        limits_of=lambda _, __: Limits(**{"kv_tokens": 100_000, **limits}),
        link_of=lambda _: Link(1e15, 0.0, 1.0),
        slowdown=slowdown,
        dispatch_s=dispatch_s,
    )


def times(requests: list[tuple[float, int, int]], made: Machine, **options) -> list[tuple]:
    """(TTFT, e2e) of each request, in the order of arrival."""
    trace = Trace(tuple(TraceRequest(*request) for request in requests))
    recorder = simulate(PAIR, made, trace, Options(**options)).recorder
    found = dict(zip(recorder.indices, zip(recorder.ttft, recorder.e2e, strict=True), strict=True))
    return [found[index] for index in range(len(requests))]


def test_work_in_flight_is_stretched_while_the_neighbour_is_busy():
    """Of 10 s alone, 4 pass before the neighbour begins and 2 s of work while it runs for 6."""
    loop, ended = EventLoop(), []
    mine, neighbour = Pace(loop, 3.0), Pace(loop)
    mine.share_with(neighbour)
    mine.begin(10.0, lambda _: ended.append(loop.now), None)
    loop.at(4.0, neighbour.set_busy, True)
    loop.at(10.0, neighbour.set_busy, False)
    loop.run()
    assert ended == [pytest.approx(14.0)]


@both
def test_a_prompt_slows_the_steps_beside_it_and_no_others(exact):
    """The first request decodes 100 steps alone, but for the 500 ms that the second one's prompt
    takes; that one takes twice as long beside it. Steps beside it take 1.5 times as long."""
    requests = [(0.0, 100, 101), (0.5, 250, 1)]
    (_, alone), _ = times(requests[:1] + [(50.0, 250, 1)], machine(Slowdown(2.0, 1.5)), exact=exact)
    (_, beside), (ttft, _) = times(requests, machine(Slowdown(2.0, 1.5)), exact=exact)
    assert alone == pytest.approx(0.1 + 1.0)
    assert ttft == pytest.approx(0.5)
    # In half a second 33 steps instead of 50: the 17 that are missing come after it.
    assert beside == pytest.approx(0.1 + 1.0 + 0.5 / 3, abs=0.011)


@both
def test_hosts_of_their_own_disturb_nobody(exact):
    requests = [(0.0, 100, 101), (0.5, 250, 1)]
    assert times(requests, machine(), exact=exact) == [
        pytest.approx((0.1, 1.1)),
        pytest.approx((0.25, 0.25)),
    ]


def test_fast_and_exact_agree_on_shared_hosts():
    dice, requests, now = random.Random(4), [], 0.0
    for _ in range(150):
        requests.append(TraceRequest(now, dice.randint(20, 400), dice.randint(2, 80)))
        now += dice.expovariate(2.5)
    fast, exact = (
        simulate(PAIR, machine(Slowdown(1.3, 1.4)), Trace(tuple(requests)), Options(exact=kind))
        for kind in (False, True)
    )
    for name in ("ttft", "tpot"):
        for percent in (50, 90):
            ours = percentile(getattr(fast.recorder, name), percent)
            theirs = percentile(getattr(exact.recorder, name), percent)
            assert ours == pytest.approx(theirs, rel=0.03), (name, percent)


def test_two_colocated_workers_share_a_host_too():
    trace = Trace((TraceRequest(0.0, 300, 1), TraceRequest(0.0, 300, 1)))
    layout = Layout(colocated=Pool(2))
    for slowdown, seconds in ((None, 0.3), (Slowdown(1.5, 1.2), 0.45)):
        recorder = simulate(layout, machine(slowdown), trace).recorder
        assert list(recorder.ttft) == pytest.approx([seconds] * 2)


@both
def test_the_way_through_the_router_counts_once(exact):
    ((ttft, _),) = times([(0.0, 100, 1)], machine(dispatch_s=0.007), exact=exact)
    assert ttft == pytest.approx(0.107)


@both
def test_the_router_holds_back_what_would_only_wait_on_the_worker(exact):
    """600 tokens are more than it sends ahead: the others come one by one, and the second does
    not wait for the third in a step of both. Sent on at once, they share one."""
    requests = [(0.0, 600, 1), (0.01, 400, 1), (0.02, 400, 1)]
    held = [ttft for ttft, _ in times(requests, machine(), exact=exact, holds_back=True)]
    sent = [ttft for ttft, _ in times(requests, machine(), exact=exact)]
    assert held == pytest.approx([0.6, 0.99, 1.38], abs=0.01)
    assert sent == pytest.approx([0.6, 1.39, 1.38], abs=0.01)


def test_requests_are_held_back_while_the_decode_batch_is_full():
    """Room for one: with one and a seat ahead there, the third prompt waits for an end."""
    requests = [(0.0, 10, 101), (0.0, 10, 101), (0.0, 10, 101)]
    ttfts = [ttft for ttft, _ in times(requests, machine(max_num_seqs=1), holds_back=True)]
    assert ttfts[1] < 0.05 and ttfts[2] == pytest.approx(1.02, abs=0.05)
