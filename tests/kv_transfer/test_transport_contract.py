"""What every transport promises (`kv_transfer.base`), held against all of them."""

import asyncio

import numpy as np
import pytest

from core.errors import HandoverError
from kv_transfer.base import Peer, TransferInDoubt
from support.kv_pairs import TRANSPORTS, KvPair
from support.kv_peer import block_pattern

NUM_BLOCKS, SIZE = 96, 64 * 1024
PATIENCE_S = 20  # a bound on a hang, not a measure


@pytest.fixture(params=TRANSPORTS)
async def pair(request, source):
    """A fresh receiver and the peer `prefill-0` that holds `block_pattern(0, ...)`."""
    made = KvPair(request.param, NUM_BLOCKS, SIZE)
    yield made, made.adopt(source)
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


async def test_blocks_of_another_size_are_never_mixed_up(source):
    for transport in TRANSPORTS:
        other = KvPair(transport, NUM_BLOCKS, SIZE // 2)
        try:
            with pytest.raises(HandoverError):
                await other.transfer.pull(other.adopt(source), "r", [0, 1], [0, 1])
        finally:
            await other.close()


@pytest.mark.parametrize("size", [SIZE // 2, SIZE, SIZE * 2])
async def test_pieces_of_blocks_of_another_shape(source, size):
    """Blocks named twice, pieces in any order, neighbours and not; nothing else is written."""
    rng = np.random.default_rng(size)
    for transport in TRANSPORTS:
        made = KvPair(transport, 24, size)
        try:
            step = min(size, SIZE) // 16
            kinds = []
            for _ in range(3):
                reads = rng.permutation(SIZE // step)[:4] * step
                writes = (rng.permutation(size // step)[:4]) * step
                kinds.append(
                    tuple((int(r), int(w), step) for r, w in zip(reads, writes, strict=True))
                )
            kinds.append(((0, 0, step), (step, step, step), (2 * step, 2 * step, 5)))
            local = rng.permutation(24)[:20].tolist()
            remote = rng.integers(0, NUM_BLOCKS, 20).tolist()
            pieces = [kinds[i % 4] for i in range(20)]
            made.blocks[:] = 7
            expected = made.blocks.copy()
            blocks = source.blocks
            for i, kind in enumerate(pieces):
                for read, write, length in kind:
                    part = blocks[remote[i], read : read + length]
                    expected[local[i], write : write + length] = part
            async with asyncio.timeout(PATIENCE_S):
                await made.transfer.pull(made.adopt(source), "r", remote, local, pieces)
            assert (made.blocks == expected).all(), transport
        finally:
            await made.close()


@pytest.mark.parametrize("piece", [(0, SIZE - 4, 5), (SIZE - 4, 0, 5), (0, -1, 4), (0, 0, 0)])
async def test_pieces_outside_of_a_block_are_refused(pair, piece):
    made, peer = pair
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(HandoverError):
            await made.transfer.pull(peer, "r", [0, 1], [0, 1], [(piece,), (piece,)])
        with pytest.raises(HandoverError, match="pieces of 1 blocks for 2"):
            await made.transfer.pull(peer, "r", [0, 1], [0, 1], [((0, 0, 4),)])
    assert (made.blocks == 0).all()


async def pull_for_ever(made: KvPair, peer: Peer) -> None:
    ids = list(range(NUM_BLOCKS))
    while True:
        await made.transfer.pull(peer, "r", ids, ids)
        await asyncio.sleep(0)


async def test_closing_ends_pulls_in_flight(pair):
    made, peer = pair
    running = asyncio.create_task(pull_for_ever(made, peer))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(PATIENCE_S):
        await made.transfer.close()
        with pytest.raises(HandoverError):
            await running
    made.blocks[:] = 3
    await asyncio.sleep(0.05)
    assert (made.blocks == 3).all()


async def test_a_killed_peer_fails_alone_and_its_successor_is_reached(pair):
    """SIGKILL in the middle of pulls: they fail, blocks stay quiet, another peer's pulls go on,
    and a new incarnation under the same worker id works while the old one stays refused."""
    made, survivor = pair
    ids = list(range(NUM_BLOCKS))
    made.start("prefill-1", "a", seed=1)
    made.start("prefill-1", "b", seed=2)
    victim = made.peer("prefill-1", "a")
    await made.transfer.pull(victim, "warm", ids, ids)
    assert (made.blocks == block_pattern(1, NUM_BLOCKS, SIZE)).all()

    running = asyncio.create_task(pull_for_ever(made, victim))
    await asyncio.sleep(0.05)
    made.kill("prefill-1", "a")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(HandoverError) as failure:
            await running
    assert not isinstance(failure.value, TransferInDoubt)
    assert "prefill-1" in failure.value.message
    made.blocks[:] = 9
    await asyncio.sleep(0.05)
    assert (made.blocks == 9).all()

    successor = made.peer("prefill-1", "b")
    async with asyncio.timeout(PATIENCE_S):
        await made.transfer.pull(survivor, "r", ids, ids)
        assert (made.blocks == block_pattern(0, NUM_BLOCKS, SIZE)).all()
        for _ in range(2):
            with pytest.raises(HandoverError):
                await made.transfer.pull(victim, "r", ids, ids)
            await made.transfer.pull(successor, "r", ids, ids)
            assert (made.blocks == block_pattern(2, NUM_BLOCKS, SIZE)).all()
