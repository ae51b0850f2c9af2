"""Several copies as one: what ends it, and when."""

import asyncio

import pytest

from core.errors import HandoverError
from kv_transfer.base import TransferInDoubt
from kv_transfer.fan_out import together


class Copy:
    """One copy, driven by hand. Cancelled, it ends when `let_go` is set, as a wire does."""

    def __init__(self, doubt: asyncio.Event | None = None) -> None:
        self.outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.let_go = asyncio.Event()
        self.doubt = doubt
        self.is_writing = False
        self.was_cancelled = False

    async def run(self) -> int:
        self.is_writing = True
        try:
            return await asyncio.shield(self.outcome)
        except asyncio.CancelledError:
            self.was_cancelled = True
            await self.let_go.wait()
            if self.doubt is not None:
                raise TransferInDoubt("no progress", self.doubt) from None
            raise
        finally:
            self.is_writing = False


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_results_in_order():
    copies = [Copy(), Copy(), Copy()]
    running = asyncio.ensure_future(together([copy.run() for copy in copies]))
    for value in (2, 0, 1):
        await settle()
        copies[value].outcome.set_result(value)
    assert await running == [0, 1, 2]
    assert await together([]) == []


async def test_a_failure_stops_the_others_and_waits_for_them():
    """V06, V04: siblings of a failed transfer are in flight."""
    copies = [Copy(), Copy(), Copy()]
    running = asyncio.ensure_future(together([copy.run() for copy in copies]))
    await settle()
    copies[1].outcome.set_exception(HandoverError("rank 1 broke"))
    await settle()
    assert copies[0].was_cancelled and copies[2].was_cancelled and not running.done()
    copies[0].let_go.set()
    await settle()
    assert not running.done()  # one still writes
    copies[2].let_go.set()
    with pytest.raises(HandoverError, match="rank 1 broke"):
        await running


async def test_a_cancellation_is_passed_on_and_waits():
    copies = [Copy(), Copy()]
    running = asyncio.ensure_future(together([copy.run() for copy in copies]))
    await settle()
    running.cancel()
    await settle()
    assert all(copy.was_cancelled for copy in copies) and not running.done()
    copies[0].let_go.set()
    copies[1].let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_doubt_of_some_is_doubt_of_all_until_each_is_quiet(is_cancelled):
    quiets = [asyncio.Event(), asyncio.Event()]
    copies = [Copy(), Copy(quiets[0]), Copy(quiets[1])]
    running = asyncio.ensure_future(together([copy.run() for copy in copies]))
    await settle()
    if is_cancelled:
        running.cancel()
        copies[0].let_go.set()
    else:
        copies[0].outcome.set_exception(HandoverError("rank 0 broke"))
    await settle()
    copies[1].let_go.set()
    copies[2].let_go.set()
    with pytest.raises(TransferInDoubt) as doubt:
        await running
    quiets[1].set()
    await settle()
    assert not doubt.value.quiet.is_set()
    quiets[0].set()
    await asyncio.wait_for(doubt.value.quiet.wait(), 5)


async def test_a_second_cancellation_does_not_let_go_early():
    copies = [Copy(), Copy()]
    running = asyncio.ensure_future(together([copy.run() for copy in copies]))
    await settle()
    running.cancel()
    await settle()
    copies[0].let_go.set()
    await settle()
    assert not running.done() and copies[1].is_writing
    copies[1].let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
