"""What the dashboard shows in a browser, state by state.

`make pictures` runs these tests with PDSERVE_PICTURES=FOLDER: then each also leaves a picture of
the state that it has seen.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rpc import worker_pb2
from support.browser import CHROMIUM, chromium
from support.dashboard_scene import ANSWER, break_twice, scene
from support.router import Running, running
from support.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not on PATH (Debian: apt install chromium)"
    ),
]
pytest.importorskip("playwright", reason="playwright is not installed")

_PICTURES = os.environ.get("PDSERVE_PICTURES")
_EVIL = "<img/src=x/onerror=document.title='gone'>"
_CLIPS = {"light": {"clip": {"x": 0, "y": 0, "width": 1280, "height": 800}}}
# Colours of all dots that have been on the wires.
_WATCH_DOTS = """() => {
  window.seenDots = new Set();
  new MutationObserver(changes => changes.forEach(change => change.addedNodes.forEach(
    node => node.tagName === 'circle' && seenDots.add(node.getAttribute('fill')))))
    .observe(document.getElementById('wires'), {childList: true});
}"""
# The least contrast, by WCAG 2, of text that is seen with what is behind it.
_LEAST_CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  let least = [99, ''];
  for (const node of document.querySelectorAll('main *')) {
    const own = [...node.childNodes].some(c => c.nodeType === 3 && c.data.trim());
    if (!own || !node.checkVisibility()) continue;
    let back = node;
    const behind = n => getComputedStyle(n || document.body).backgroundColor;
    while (back && rgb(behind(back))[3] === 0) back = back.parentElement;
    const style = getComputedStyle(node);
    const front = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgb(front)), light(rgb(behind(back)))];
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < least[0]) least = [contrast, node.textContent];
  }
  return least;
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with chromium() as running_browser:
        yield running_browser


@asynccontextmanager
async def opened(
    browser: Any,
    it: Running,
    scheme: str = "dark",
    ignore: str = "",
    **options: Any,
) -> AsyncIterator[Any]:
    """The page, live. Nothing may have been complained of in the end."""
    problems: list[str] = []
    page = await browser.new_page(
        color_scheme=scheme, viewport={"width": 1280, "height": 1330}, **options
    )
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        await page.goto(f"{it.url}/dashboard")
        await page.wait_for_selector("body[data-live=yes]")
        yield page
        assert [problem for problem in problems if not ignore or ignore not in problem] == []
        assert await page.title() == "pdserve"
    finally:
        await page.close()


async def picture(name: str, of: Any, **options: Any) -> None:
    """`of`: the page, or a part of it."""
    if _PICTURES:
        await of.screenshot(path=Path(_PICTURES) / f"dashboard-{name}.png", **options)


async def settled(seconds: float) -> None:
    """Pictures want more on the charts than tests do."""
    if _PICTURES:
        await asyncio.sleep(seconds)


async def shows(page: Any, selector: str, text: str) -> None:
    await page.wait_for_function(
        "([s, t]) => document.querySelector(s)?.textContent.includes(t)", arg=[selector, text]
    )


async def test_idle_workers_stand_in_their_pools(browser: Any) -> None:
    async with scene() as it, opened(browser, it) as page:
        for pool in ("prefill", "decode"):
            names = await page.locator(f"#p-{pool} .node .top b").all_text_contents()
            assert names == [f"{pool}-0", f"{pool}-1"]
        assert await page.locator("#n-router").text_content() == "router0requests in flight"
        assert await page.text_content("#v-ttft") == "no requests"
        assert await page.locator("#wires .kvway").count() == 4, "from each to each"
        await shows(page, "#state", "ready")
        await picture("idle", page, clip={"x": 0, "y": 0, "width": 1280, "height": 640})


async def test_a_card_shows_batch_queue_and_blocks_of_its_worker(browser: Any) -> None:
    async with running() as it, opened(browser, it) as page:
        worker = it.worker("decode-0")
        blocks = dict(total=256, free=96, cached=32, running=64, held=16, awaiting=48)
        worker.status.kv_blocks.CopyFrom(worker_pb2.KvBlockCounts(**blocks))
        worker.report(requests_running=16, requests_waiting=4, waiting_prefill_tokens=900)
        card = "#p-decode .node"
        await shows(page, card, "16 of 64")
        await shows(page, card, "4 · 900 tokens")
        await shows(page, card, "160 of 256")
        widths = {
            name: await page.eval_on_selector(f"{card} .c-{name}", "node => node.style.width")
            for name in ("batch", "queue", "running", "held", "awaiting", "cached")
        }
        assert widths == {
            "batch": "25%", "queue": "25%", "running": "25%", "held": "6.25%",
            "awaiting": "18.75%", "cached": "12.5%",
        }  # fmt: skip


async def test_under_load_everything_moves_and_can_be_read(browser: Any) -> None:
    async with scene(num_clients=10) as it, opened(browser, it) as page:
        await page.evaluate(_WATCH_DOTS)
        await page.wait_for_function(
            "() => ['prefill', 'kv', 'decode'].every(k => seenDots.has(`var(--${k})`))"
        )
        for chart in ("ttft", "tpot", "itl"):
            await page.wait_for_selector(f"#c-{chart} .p50[d*='L']", state="attached")
        await page.wait_for_function(
            "() => /KV .*B.s/.test(document.querySelector('.kvrate').textContent)"
        )
        await page.wait_for_selector("#w-svg rect[fill='var(--kv)']")
        await settled(40)
        for name, scheme, width, background in (
            ("dark", "dark", 1280, "rgb(11, 15, 23)"),
            ("light", "light", 1280, "rgb(244, 246, 250)"),
            ("phone", "light", 390, "rgb(244, 246, 250)"),
        ):
            await page.emulate_media(color_scheme=scheme)
            await page.set_viewport_size({"width": width, "height": 1330})
            await settled(2)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert background == await page.evaluate(
                "getComputedStyle(document.body).backgroundColor"
            )
            contrast, text = await page.evaluate(_LEAST_CONTRAST)
            assert contrast >= 4.5, text
            await picture(name, page, full_page=name == "phone", **_CLIPS.get(name, {}))


async def test_by_keyboard_the_playground_streams_and_its_timeline_draws_itself(
    browser: Any,
) -> None:
    async with scene() as it, opened(browser, it, reduced_motion="reduce") as page:
        gate = asyncio.Semaphore(0)
        for name in ("decode-0", "decode-1"):
            it.worker(name).gate = gate
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "prompt"
        await page.keyboard.press("Control+Enter")
        for num_tokens in (1, 21, 61):
            await shows(page, "#answer", ANSWER[:num_tokens])
            await page.wait_for_function(
                f"() => document.querySelectorAll('#w-svg .tick').length === {num_tokens}"
            )
            assert await page.text_content("#answer") == ANSWER[:num_tokens]
            assert await page.evaluate("document.body.dataset.answered") is None
            if num_tokens == 61:
                break
            for _ in range(20 if num_tokens == 1 else 40):
                gate.release()
        await picture("playground", page.locator(".stack"))
        assert await page.locator("#wires circle").count() == 0, "reduced motion"
        await page.keyboard.press("Escape")
        await shows(page, "#p-facts", "stopped")
        await eventually(lambda: not it.in_flight)
        # The next one goes to its end.
        for _ in range(200):
            gate.release()
        await page.keyboard.press("Control+Enter")
        await shows(page, "#p-facts", "done after")
        assert await page.text_content("#answer") == ANSWER[:128]
        facts = await page.text_content("#w-facts")
        assert facts is not None and "play-" in facts and "128 out" in facts
        assert await page.locator("#w-svg .tick").count() == 128


async def test_a_retry_and_a_resume_are_seen_in_the_waterfall(browser: Any) -> None:
    async with scene() as it:
        break_twice(it)
        body = {"model": "fake", "prompt": "p" * 1400, "max_tokens": 64}
        await it.http.post("/v1/completions", json=body, headers={"x-request-id": _EVIL})
        async with opened(browser, it) as page:
            row = page.locator("#rows button").first
            await row.focus()
            await page.keyboard.press("Enter")
            await shows(page, "#w-facts", "attempts 3")
            assert await row.text_content() == _EVIL
            assert await page.text_content("#rows tr:first-child td:last-child") == "ok ×3"
            titles = await page.locator("#w-svg title").all_text_contents()
            kinds = {title.split(":")[0] for title in titles}
            assert kinds >= {
                "tokenize", "queue", "prefill", "kv pull", "commit to release",
                "first decode step", "decode", "attempt ended",
            }  # fmt: skip
            assert sum("connection reset" in title for title in titles) == 2
            assert any("GB/s" in title for title in titles)
            lanes = await page.locator("#w-svg .bar-label").all_text_contents()
            assert set(lanes) == {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"}
            await picture("resume", page.locator(".waterfall"))


async def test_a_colocated_pool_is_one_pool(browser: Any) -> None:
    async with running(colocated=2, prefills=0, decodes=0) as it, opened(browser, it) as page:
        await it.complete("hello", max_tokens=4)
        assert await page.locator("#p-prefill").is_hidden()
        assert await page.text_content("#t-decode") == "Workers"
        assert await page.locator(".node:not(.router)").count() == 2
        assert await page.locator("#wires .kvway").count() == 0
        await shows(page, "#w-svg", "colocated-0")
        await picture("colocated", page.locator("#picture"))


async def test_lost_workers_and_a_lost_router_are_said(browser: Any) -> None:
    async with running() as it, opened(browser, it, "light", ignore="net::ERR_") as page:
        await it.complete("hello", max_tokens=4)
        await it.worker("decode-0").die()
        it.cluster.remove("prefill-0")
        await shows(page, "#state", "not ready")
        await page.wait_for_function("() => !document.querySelector('#p-prefill .node')")
        await shows(page, "#p-decode .node", "unreachable")
        await picture("not-ready", page, clip={"x": 0, "y": 0, "width": 1280, "height": 470})
        await it.server.close(grace_s=0)
        await shows(page, "#state", "no connection")
