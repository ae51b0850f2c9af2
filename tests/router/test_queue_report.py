"""The controller hears what waits in the router."""

import asyncio

import pytest

from core.errors import OverloadedError
from router.placement.turnstile import Estimate, Turnstile
from support.waiting import eventually


class Full:
    def has_room(self) -> bool:
        return False


async def test_what_waits_is_told_to_the_controller_and_that_it_is_over(router):
    reports, prefill = router.cluster.queue_reports, router.worker("prefill-0")
    prefill.report(requests_running=2, waiting_prefill_tokens=4000)
    ours = router.server.registry.workers["prefill-0"]
    await eventually(lambda: ours.status == prefill.status)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 2, "temperature": 0}
    task = asyncio.create_task(router.http.post("/v1/completions", json=body))
    await eventually(lambda: bool(reports))
    assert (reports[0].prompts, reports[0].prompt_tokens) == (1, 5)
    assert reports[0].oldest_seconds > 0 and reports[0].router_id
    prefill.report(requests_running=0, waiting_prefill_tokens=0)
    assert (await task).status_code == 200
    await eventually(lambda: reports[-1].prompts == 0)
    assert {report.router_id for report in reports} == {reports[0].router_id}


async def test_those_that_are_refused_are_counted():
    turnstile = Turnstile(Full(), limit=1, slo_ttft_s=1.0)

    async def ask(estimate: Estimate) -> None:
        async with turnstile.turn("", 0, 100, lambda: estimate):
            raise AssertionError("nobody is let through")

    first = asyncio.create_task(ask(Estimate(num_tokens=70)))
    await asyncio.sleep(0.01)
    now = turnstile.waiting()
    assert now[:2] == (1, 70) and now.oldest_s > 0 and now[3:] == (0, 0)
    for estimate in (Estimate(num_tokens=30), Estimate(queue_s=9.0, num_tokens=5)):
        with pytest.raises(OverloadedError):
            await ask(estimate)
    with pytest.raises(OverloadedError):
        turnstile.check(2.0, Estimate(num_tokens=7))
    assert turnstile.waiting()[3:] == (3, 42)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert turnstile.waiting()[:3] == (0, 0, 0.0)
    await turnstile.close()
