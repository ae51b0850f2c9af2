"""The twin's faults, on which tests of the hand-over rest."""

import asyncio

import pytest
import torch

from core.errors import HandoverError
from kv_transfer.base import Peer, TransferInDoubt
from support.local_transport import LocalNetwork, LocalTransfer

PEER = Peer("prefill-0", "a", "", b"")


@pytest.fixture
def network():
    return LocalNetwork()


@pytest.fixture
async def transfer(network):
    LocalTransfer(network, torch.arange(1.0, 9.0).repeat_interleave(4).view(8, 4), "prefill-0", "a")
    made = LocalTransfer(
        network, torch.zeros(8, 4), "decode-0", "d", liveness_s=0.05, cancel_s=0.02
    )
    yield made
    await made.close()


async def test_a_stalled_peer_writes_late_and_then_is_quiet(network, transfer):
    network.stall("prefill-0")
    with pytest.raises(TransferInDoubt) as doubt:
        await transfer.pull(PEER, "r", [1, 2], [0, 1])
    assert not doubt.value.quiet.is_set()
    assert transfer.kv_cache.count_nonzero() == 0
    network.resume("prefill-0")
    await doubt.value.quiet.wait()
    assert (transfer.kv_cache[0] == 2).all()  # the late bytes that quarantine is for
    assert transfer.kv_cache[1:].count_nonzero() == 0


async def test_a_cancelled_pull_from_a_stalled_peer_is_in_doubt(network, transfer):
    network.stall("prefill-0")
    pull = asyncio.create_task(transfer.pull(PEER, "r", [1], [0]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(TransferInDoubt) as doubt:
        await pull
    network.kill("prefill-0", "a")
    await doubt.value.quiet.wait()
    assert transfer.kv_cache.count_nonzero() == 0


async def test_a_lost_block_fails_the_pull(network, transfer):
    async def lose_the_third(peer, request_id, position):
        if position == 2:
            raise HandoverError(f"{request_id}: lost")

    network.before_block = lose_the_third
    with pytest.raises(HandoverError, match="r: lost"):
        await transfer.pull(PEER, "r", [0, 1, 2], [0, 1, 2])
    assert (transfer.kv_cache[1] == 2).all()
    assert transfer.kv_cache[2:].count_nonzero() == 0


async def test_a_slow_link_can_be_cancelled(network, transfer):
    async def slow(peer, request_id, position):
        if position == 1:
            await asyncio.sleep(3600)

    network.before_block = slow
    pull = asyncio.create_task(transfer.pull(PEER, "r", [0, 1], [0, 1]))
    while transfer.kv_cache.count_nonzero() == 0:
        await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert transfer.kv_cache[1:].count_nonzero() == 0


async def test_a_block_can_be_damaged(network, transfer):
    def flip(peer, position, block):
        if position == 1:
            block[0] ^= 1

    network.after_block = flip
    await transfer.pull(PEER, "r", [0, 0], [0, 1])
    assert (transfer.kv_cache[0] == 1).all()
    assert not torch.equal(transfer.kv_cache[0], transfer.kv_cache[1])
