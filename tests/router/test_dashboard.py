"""The dashboard: what it sends and what it allows. `test_dashboard_browser.py` looks at it."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router import dashboard
from support.router import Running


def _page() -> str:
    return (Path(dashboard.__file__).parent / "dashboard.html").read_text()


async def _messages(it: Running, count: int) -> list[dict]:
    found = []
    async with it.http.stream("GET", "/dashboard/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                break
    return found


async def test_the_page_allows_its_own_script_and_style_alone(router: Running) -> None:
    response = await router.http.get("/dashboard")
    assert response.status_code == 200 and response.text == _page()
    policy = response.headers["content-security-policy"]
    assert policy == dashboard.content_security_policy(_page())
    assert "unsafe" not in policy and "http" not in policy and policy.count("'sha256-") == 2
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def test_the_page_asks_nobody_else_and_parses_nothing_as_html() -> None:
    page = _page()
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|srcdoc", page)
    assert not re.search(r"<[a-z][^>]*\s(?:on[a-z]+|style)=", page), "CSP would drop it"
    assert "prefers-color-scheme: dark" in page and "prefers-reduced-motion" in page


async def test_events_tell_of_workers_requests_and_what_just_happened(router: Running) -> None:
    reading = asyncio.create_task(_messages(router, 3))
    await asyncio.sleep(0.1)
    await router.complete("hello", max_tokens=4)
    messages = await reading
    first, last = messages[0], messages[-1]
    assert first["events"] == [] and first["requests"] == []
    assert {worker["id"] for worker in last["workers"]} == {"prefill-0", "decode-0"}
    assert not any({"address", "host", "pid"} & set(worker) for worker in last["workers"])
    kinds = [event["kind"] for message in messages for event in message["events"]]
    assert kinds == ["placed", "token", "kv", "finished"]
    (request,) = last["requests"]
    assert request["outcome"] == "ok" and request["num_output_tokens"] == 4
    assert last["window"]["ttft"]["p50"] == request["ttft_seconds"]
    assert last["window"]["tokens_per_second"] == pytest.approx(0.4)


async def test_the_number_of_open_pages_is_bounded(router: Running, monkeypatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_CLIENTS", 2)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            response = await stack.enter_async_context(
                router.http.stream("GET", "/dashboard/events")
            )
            assert response.status_code == 200
        assert (await router.http.get("/dashboard/events")).status_code == 429
    # Pages that were closed make room again.
    for _ in range(100):
        async with router.http.stream("GET", "/dashboard/events") as response:
            if response.status_code == 200:
                return
        await asyncio.sleep(0.05)
    pytest.fail("closed pages still count")
