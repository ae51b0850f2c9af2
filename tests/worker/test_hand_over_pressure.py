"""The hand-over with pulls that fail, callers that leave, and more requests than there is room for.

Each test ends with `wait_idle`: no block in use, no lease, both engines sound.
"""

import asyncio
from pathlib import Path

import pytest

from core.errors import (
    CorruptBlockError,
    HandoverError,
)
from kv_transfer.base import TransferInDoubt
from support.pair import (
    Pair,
    disturb,
    prompt,
    request,
    running_pair,
    tiny_config,
)


async def test_flipped_byte_is_never_decoded(any_pair: Pair) -> None:
    """V24"""
    shim = disturb(any_pair)

    def flip(kv_cache: object, local: list[int]) -> None:
        kv_cache[local[-1]].view(-1)[3] += 1  # type: ignore[index]

    shim.after = flip
    answer = await any_pair.generate(request(prompt(40)))
    assert any(isinstance(e, CorruptBlockError) for e in answer.errors)
    assert len(answer.tokens) <= 1
    await any_pair.wait_idle()
    shim.after = None
    healed = await any_pair.generate(request(prompt(40)))
    alone = await any_pair.alone(request(prompt(40), cache_salt="x"))
    assert healed.tokens == alone.tokens


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_failed_pull_ends_both_legs(any_pair: Pair, position: int) -> None:
    """V06: whichever chunk's transfer fails, both sides know at once and free everything."""
    shim = disturb(any_pair)

    async def fail(remote: list[int], local: list[int]) -> None:
        if len(shim.pulls) > position:
            raise HandoverError("the wire broke")

    shim.before = fail
    answer = await any_pair.generate(request(prompt(100)), timeout_s=5)
    if position < len(shim.pulls):
        assert answer.error is not None
    await any_pair.wait_idle(timeout_s=2)
    shim.before = None
    assert (await any_pair.generate(request(prompt(100)))).error is None


async def test_cancel_during_a_slow_pull_then_reuse(any_pair: Pair) -> None:
    """V01, V04: the client leaves while KV is on its way; the blocks go to the next request."""
    shim = disturb(any_pair)
    pulling = asyncio.Event()

    async def slowly(remote: list[int], local: list[int]) -> None:
        pulling.set()
        await asyncio.sleep(0.05)

    expected = (await any_pair.alone(request(prompt(100, seed=1), cache_salt="x"))).tokens
    for _ in range(12):  # more blocks in all than the pool has
        shim.before = slowly
        pulling.clear()
        leaving = asyncio.create_task(any_pair.generate(request(prompt(100))))
        await asyncio.wait_for(pulling.wait(), 5)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        shim.before = None
        answer = await any_pair.generate(request(prompt(100, seed=1)))
        assert answer.error is None
        assert answer.tokens == expected


async def test_copy_in_doubt_quarantines_its_blocks(pair: Pair) -> None:
    shim = disturb(pair)
    quiet = asyncio.Event()

    async def stall(remote: list[int], local: list[int]) -> None:
        raise TransferInDoubt("no progress", quiet)

    shim.before = stall
    answer = await pair.generate(request(prompt(40)))
    assert isinstance(answer.error, HandoverError)
    assert (await pair.counts(pair.decode)).awaiting == 5
    quiet.set()
    await pair.wait_idle()


# ------------------------------------------------------------------ cancels and pressure


async def test_cancel_reaches_prefill_at_the_next_chunk(pair: Pair) -> None:
    """V23"""
    engine = pair.prefill.runtime.engine
    forward = engine.model.forward
    chunks = 0
    first_chunk = asyncio.Event()
    loop = asyncio.get_running_loop()

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal chunks
        chunks += 1
        loop.call_soon_threadsafe(first_chunk.set)
        import time

        time.sleep(0.1)
        return forward(*args, **kwargs)

    engine.model.forward = counting
    leaving = asyncio.create_task(pair.generate(request(prompt(400))))
    await asyncio.wait_for(first_chunk.wait(), 5)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    at_cancel = chunks
    engine.model.forward = forward
    await pair.wait_idle()
    assert chunks <= at_cancel + 1  # 400 tokens would be 13 chunks


async def test_more_requests_than_decode_has_room_for(tiny_model_dir: Path) -> None:
    """V13: those who wait for D's blocks keep their lease; nobody fails, nothing deadlocks."""
    config = tiny_config(tiny_model_dir, num_kv_blocks=40)
    small = tiny_config(tiny_model_dir, num_kv_blocks=24, max_num_seqs=4)
    transfer = config.kv_transfer.model_copy(update={"lease_seconds": 0.4})
    config, small = (c.model_copy(update={"kv_transfer": transfer}) for c in (config, small))
    async with running_pair(config, small) as pair:
        lengths = [5, 90, 17, 60, 33, 80, 8, 41] * 4
        answers = await asyncio.gather(
            *[
                pair.generate(request(prompt(n, seed=i), max_tokens=20), timeout_s=60)
                for i, n in enumerate(lengths)
            ]
        )
        assert [a.error for a in answers] == [None] * len(lengths)
        for i in (0, 1, 5, 31):
            alone = await pair.alone(
                request(prompt(lengths[i], seed=i), max_tokens=20, cache_salt="x")
            )
            assert answers[i].tokens == alone.tokens
        await pair.wait_idle()


async def test_burst_of_cancels_then_a_probe(pair: Pair) -> None:
    """V12: cleaning up needs no new work, and no free block."""
    shim = disturb(pair)

    async def slowly(remote: list[int], local: list[int]) -> None:
        await asyncio.sleep(0.2)

    shim.before = slowly
    for round_ in range(3):
        burst = [
            asyncio.create_task(
                pair.generate(request(prompt(60, seed=100 * round_ + i)), timeout_s=60)
            )
            for i in range(30)
        ]
        await asyncio.sleep(0.1)
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
    shim.before = None
    probe = await pair.generate(request(prompt(60)), timeout_s=10)
    assert probe.error is None


async def test_preempted_on_decode_recomputes_there(tiny_model_dir: Path) -> None:
    """V11: D's pool is too small for all outputs; whoever is preempted must not ask P again."""
    config = tiny_config(tiny_model_dir)
    small = tiny_config(tiny_model_dir, num_kv_blocks=20)
    async with running_pair(config, small) as pair:
        requests = [request(prompt(24, seed=i), max_tokens=60) for i in range(4)]
        answers = await asyncio.gather(*[pair.generate(r, timeout_s=60) for r in requests])
        stats = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
        assert stats.preemptions_total > 0
        for i, answer in enumerate(answers):
            alone = await pair.alone(request(prompt(24, seed=i), max_tokens=60, cache_salt=f"x{i}"))
            assert answer.tokens == alone.tokens
        await pair.wait_idle()
