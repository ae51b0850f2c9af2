"""What every transport promises (`kv_transfer.base`), held against all of them."""

import asyncio
import contextlib

import numpy as np
import pytest
from support.kv_pairs import TRANSPORTS, KvPair
from support.kv_peer import block_pattern

from core.errors import HandoverError
from kv_transfer.base import TransferInDoubt

NUM_BLOCKS, SIZE = 96, 64 * 1024
PATIENCE_S = 20  # a bound on a hang, not a measure


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared(request):
    """A pair whose source lives through the module; the transfer side is made per test."""
    source = KvPair(request.param, NUM_BLOCKS, SIZE)
    peer = source.start()
    yield request.param, source, peer
    asyncio.run(source.close())


@pytest.fixture
async def pair(shared):
    transport, source, peer = shared
    made = KvPair(transport, NUM_BLOCKS, SIZE, source.network)
    yield made, peer
    await made.close()


@pytest.fixture(params=TRANSPORTS)
async def own(request):
    """A pair of this test's own, whose sources may be killed."""
    made = KvPair(request.param, NUM_BLOCKS, SIZE)
    yield made
    await made.close()


def shuffled(seed: int, count: int = NUM_BLOCKS) -> list[int]:
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count].tolist()


async def test_scattered_blocks_arrive_and_no_other_is_touched(pair):
    made, peer = pair
    remote, local = shuffled(1, 40), shuffled(2, 40)
    made.blocks[:] = 7
    async with asyncio.timeout(PATIENCE_S):
        await made.transfer.pull(peer, "r", remote, local)
    assert (made.blocks[local] == block_pattern(0, NUM_BLOCKS, SIZE)[remote]).all()
    others = [block for block in range(NUM_BLOCKS) if block not in local]
    assert (made.blocks[others] == 7).all()


@pytest.mark.parametrize("count", [0, 1, 2, NUM_BLOCKS])
async def test_any_number_of_blocks(pair, count):
    made, peer = pair
    ids = list(range(count))
    async with asyncio.timeout(PATIENCE_S):
        await made.transfer.pull(peer, "r", ids, ids)
    assert (made.blocks[:count] == block_pattern(0, NUM_BLOCKS, SIZE)[:count]).all()
    assert (made.blocks[count:] == 0).all()


async def test_one_remote_block_may_fill_several(pair):
    made, peer = pair
    async with asyncio.timeout(PATIENCE_S):
        await made.transfer.pull(peer, "r", [5, 5, 6], [0, 9, 1])
    source = block_pattern(0, NUM_BLOCKS, SIZE)
    assert (made.blocks[[0, 9, 1]] == source[[5, 5, 6]]).all()


@pytest.mark.parametrize(
    ("remote", "local"),
    [([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([0], [-1]), ([0, 1], [0]), ([0, 1], [3, 3])],
)
async def test_wrong_ids_are_refused_and_write_nothing(pair, remote, local):
    made, peer = pair
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(HandoverError):
            await made.transfer.pull(peer, "r", remote, local)
        assert (made.blocks == 0).all()
        await made.transfer.pull(peer, "r", [1], [1])


async def test_pulls_side_by_side(pair):
    made, peer = pair
    remote, local = shuffled(3), shuffled(4)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for start in range(0, NUM_BLOCKS, 8):
            part = slice(start, start + 8)
            group.create_task(made.transfer.pull(peer, f"r{start}", remote[part], local[part]))
    assert (made.blocks[local] == block_pattern(0, NUM_BLOCKS, SIZE)[remote]).all()


async def test_carrier_is_known_after_the_first_pull(pair):
    made, peer = pair
    assert made.transfer.carrier(peer) == ""
    await made.transfer.pull(peer, "r", [0], [0])
    expected = {"nixl": {"cma", "tcp", "ucx"}, "grpc": {"tcp"}, "local": {"memory"}}
    assert made.transfer.carrier(peer) in expected[made.transfer.name]
    made.transfer.forget(peer.worker_id)
    assert made.transfer.carrier(peer) == ""
    await made.transfer.pull(peer, "r", [1], [1])
    assert (made.blocks[1] == block_pattern(0, NUM_BLOCKS, SIZE)[1]).all()


async def test_a_cancelled_pull_leaves_its_blocks_alone(pair):
    """At any point of a pull: once the cancellation is out, nothing writes any more."""
    made, peer = pair
    ids = list(range(NUM_BLOCKS))
    await made.transfer.pull(peer, "warm", ids, ids)
    outcomes = set()
    for attempt in range(24):
        pull = asyncio.create_task(made.transfer.pull(peer, f"r{attempt}", ids, ids))
        for _ in range(attempt % 4):
            await asyncio.sleep(0)
        await asyncio.sleep(attempt * 0.0003)
        pull.cancel()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await pull
            outcomes.add("done")
        except asyncio.CancelledError:
            outcomes.add("cancelled")
        made.blocks[:] = attempt
        await asyncio.sleep(0.01)
        assert (made.blocks == attempt).all()
    assert "cancelled" in outcomes
    await made.transfer.pull(peer, "after", ids, ids)
    assert (made.blocks == block_pattern(0, NUM_BLOCKS, SIZE)).all()


async def test_pull_after_close_is_refused(pair):
    made, peer = pair
    await made.transfer.pull(peer, "r", [0], [0])
    await made.transfer.close()
    await made.transfer.close()
    with pytest.raises(HandoverError):
        await made.transfer.pull(peer, "r", [0], [0])


async def test_blocks_of_another_size_are_never_mixed_up(shared):
    transport, source, peer = shared
    other = KvPair(transport, NUM_BLOCKS, SIZE // 2, source.network)
    try:
        with pytest.raises(HandoverError):
            await other.transfer.pull(peer, "r", [0, 1], [0, 1])
    finally:
        await other.close()


async def test_a_killed_peer_fails_its_pulls_and_no_others(own):
    survivor = own.start("prefill-1", seed=1)
    victim, ids = own.start("prefill-0"), list(range(NUM_BLOCKS))
    await own.transfer.pull(victim, "warm", ids, ids)
    await own.transfer.pull(survivor, "warm", ids, ids)

    async def pull_until_it_fails() -> None:
        while True:
            await own.transfer.pull(victim, "r", ids, ids)
            await asyncio.sleep(0)

    running = asyncio.create_task(pull_until_it_fails())
    await asyncio.sleep(0.05)
    await asyncio.to_thread(own.kill, "prefill-0")
    async with asyncio.timeout(5):
        with pytest.raises(HandoverError) as failure:
            await running
    assert not isinstance(failure.value, TransferInDoubt)
    assert "prefill-0" in failure.value.message
    own.blocks[:] = 9
    await asyncio.sleep(0.05)
    assert (own.blocks == 9).all()
    async with asyncio.timeout(5):
        with pytest.raises(HandoverError):
            await own.transfer.pull(victim, "r", ids, ids)
        await own.transfer.pull(survivor, "r", ids, ids)
    assert (own.blocks == block_pattern(1, NUM_BLOCKS, SIZE)).all()


async def test_a_restarted_peer_is_reached_anew(own):
    old = own.start("prefill-0", "a", seed=1)
    await own.transfer.pull(old, "r", [0], [0])
    own.kill("prefill-0")
    new = own.start("prefill-0", "b", seed=2)
    async with asyncio.timeout(PATIENCE_S):
        await own.transfer.pull(new, "r", [3], [3])
        assert (own.blocks[3] == block_pattern(2, NUM_BLOCKS, SIZE)[3]).all()
        with pytest.raises(HandoverError):
            await own.transfer.pull(old, "r", [0], [0])
        await own.transfer.pull(new, "r", [4], [4])
    assert (own.blocks[4] == block_pattern(2, NUM_BLOCKS, SIZE)[4]).all()


async def test_closing_ends_pulls_in_flight(own):
    peer, ids = own.start(), list(range(NUM_BLOCKS))
    await own.transfer.pull(peer, "warm", ids, ids)

    async def pull_until_it_fails() -> None:
        while True:
            await own.transfer.pull(peer, "r", ids, ids)
            await asyncio.sleep(0)

    running = asyncio.create_task(pull_until_it_fails())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(running), 0.02)
    async with asyncio.timeout(PATIENCE_S):
        await own.transfer.close()
        with pytest.raises(HandoverError):
            await running
    own.blocks[:] = 3
    await asyncio.sleep(0.05)
    assert (own.blocks == 3).all()
