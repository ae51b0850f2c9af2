"""A router under a little load, for looking at its dashboard, and the pictures of the docs.

python -m support.dashboard_scene docs/images     (from tests/, with chromium and playwright)
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rpc import worker_pb2
from support.fake_workers import FakeWorker, says
from support.router import Running, running

_CHUNK_S = (0.07, 0.06, 0.08)
_QUEUE_S = 0.03
ANSWER = (
    "The sky is blue because the air scatters short waves of light far more than long ones. "
    "Sunlight holds every colour; on its way down the blue part is sent in all directions, so it "
    "reaches us from everywhere, while red and yellow come almost straight from the sun. At dusk "
    "the way through the air is longer, most of the blue is gone, and the rest glows red."
)


def _prepare(worker: FakeWorker) -> None:
    dice = random.Random(worker.id)
    worker.script = says(ANSWER)
    if worker.id.startswith("prefill"):
        worker.pause = lambda: sum(_CHUNK_S) + _QUEUE_S
        worker.prefill_started.queue_seconds = _QUEUE_S
        worker.first_token.prefill_seconds = sum(_CHUNK_S)
        for index, seconds in enumerate(_CHUNK_S):
            worker.first_token.chunks.add(
                num_tokens=512, offset_seconds=sum(_CHUNK_S[:index]), seconds=seconds
            )
    else:
        worker.pause = lambda: dice.uniform(0.012, 0.03)
        started = worker_pb2.DecodeStarted(
            kv_bytes=34_603_008,
            queue_seconds=0.01,
            queue_offset_seconds=0.09,
            kv_transfer_seconds=0.055,
            kv_tail_seconds=0.03,
            hand_over_seconds=0.272,
        )
        for offset, seconds in ((0.103, 0.018), (0.163, 0.017), (0.242, 0.02)):
            started.pulls.add(bytes=11_534_336, offset_seconds=offset, seconds=seconds)
        worker.decode_started.MergeFrom(started)


async def _report(workers: list[FakeWorker]) -> None:
    """Statuses as a worker with so much to do would send them."""
    seen = dict.fromkeys((worker.id for worker in workers), 0)
    cached = dict.fromkeys(seen, 20)
    while True:
        await asyncio.sleep(0.25)
        for worker in workers:
            new, seen[worker.id] = len(worker.requests) - seen[worker.id], len(worker.requests)
            cached[worker.id] = min(120, cached[worker.id] + 2 * new)
            mine, status = min(100, 14 * worker.active), worker.status
            is_prefill = worker.id.startswith("prefill")
            held = min(mine, 11 * len(worker.held))
            blocks = worker_pb2.KvBlockCounts(
                total=256,
                free=256 - mine - cached[worker.id],
                cached=cached[worker.id],
                held=held,
                running=(mine - held) if is_prefill else mine * 3 // 4,
                awaiting=0 if is_prefill else mine - mine * 3 // 4,
            )
            status.kv_blocks.CopyFrom(blocks)
            status.transport = "nixl (cma)"
            if is_prefill:
                status.tokens_prefilled_total += 1536 * new
            else:
                status.kv_bytes_received_total += 34_603_008 * new
            worker.report(
                requests_running=min(worker.active, 12),
                requests_waiting=max(0, worker.active - 2) if is_prefill else 0,
                waiting_prefill_tokens=1536 * max(0, worker.active - 2) if is_prefill else 0,
                tokens_decoded_total=0 if is_prefill else worker.num_tokens,
            )


async def _client(it: Running, number: int) -> None:
    dice = random.Random(number)
    while True:
        prompt = f"{number}.{dice.random()} " + "p" * dice.randint(40, 1500)
        await it.complete(prompt, max_tokens=dice.randint(20, 160))
        await asyncio.sleep(dice.uniform(0.1, 1.0))


@asynccontextmanager
async def scene(num_clients: int = 6) -> AsyncIterator[Running]:
    """2P2D of fake workers with that many clients that ask again and again."""
    async with running(prefills=2, decodes=2, prepare=_prepare) as it:
        tasks = [asyncio.create_task(_report(it.cluster.everyone))]
        tasks += [asyncio.create_task(_client(it, number)) for number in range(num_clients)]
        try:
            yield it
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


async def _pictures(folder: Path) -> None:
    from playwright.async_api import async_playwright  # not a dependency of the tests

    looks = {
        "dashboard-dark": ("dark", 1280, 1330),
        "dashboard-light": ("light", 1280, 1330),
        "dashboard-phone": ("light", 390, 1180),
    }
    async with scene() as it, async_playwright() as play:
        browser = await play.chromium.launch(executable_path="/usr/bin/chromium")
        pages = {}
        for name, (scheme, width, height) in looks.items():
            page = await browser.new_page(
                color_scheme=scheme, viewport={"width": width, "height": height}
            )
            await page.goto(f"{it.url}/dashboard")
            pages[name] = page
        await asyncio.sleep(25)
        for name, page in pages.items():
            await page.click("#go")
            await page.click("#zoom")
            await asyncio.sleep(2.5)
            await page.evaluate("scrollTo(0, 0)")
            is_phone = name.endswith("phone")
            await page.screenshot(path=folder / f"{name}.png", full_page=is_phone)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(_pictures(Path(sys.argv[1])))
