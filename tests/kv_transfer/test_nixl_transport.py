"""What is NIXL's own: its offer, stalled peers, what is left behind, the carrier."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from core.errors import HandoverError
from kv_transfer.base import Peer
from kv_transfer.nixl_agent import NixlOffer
from kv_transfer.nixl_transport import NixlTransfer
from kv_transfer.ucx_log import UcxLog
from support import kv_scenario


def run_scenario(*arguments: str, **env: str) -> dict:
    result = subprocess.run(
        [sys.executable, kv_scenario.__file__, *arguments],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(result.stdout)


def test_on_one_host():
    seen = run_scenario()
    assert seen["equal"]
    assert seen["carrier"] == "cma"
    # NIXL's default keeps a core busy; a bound far from both.
    assert seen["idle_cpu"] < 0.2
    assert seen["shm"] == []


def test_a_stopped_peer_over_tcp():
    seen = run_scenario("stalls", UCX_TLS="tcp")
    assert seen["equal"]
    assert seen["carrier"] == "tcp"
    assert "prefill-0" in seen["doubt"]
    assert not seen["quiet_while_stopped"]
    assert "in doubt" in seen["second"]  # refused at once, not after another wait
    assert seen["other_peer"]
    assert seen["late_bytes"] == 0  # none after quiet
    assert seen["again"]
    assert seen["cancelled"] == "TransferInDoubt"
    assert seen["quiet_after_kill"]
    assert seen["shm"] == []


OFFER = NixlOffer("prefill-0/a", "cuda", 3, 1 << 40, 65536, 1000, bytes(range(16)), b"md")


def test_offer_survives_the_wire():
    assert NixlOffer.decode(OFFER.encode()) == OFFER


@pytest.mark.parametrize(
    "payload", [b"", b"PDKV", b"x" * 80, b"PDKV\x02" + OFFER.encode()[5:], OFFER.encode()[:20]]
)
def test_a_broken_offer_is_refused(payload):
    with pytest.raises(HandoverError, match="not a NIXL offer"):
        NixlOffer.decode(payload)


async def test_offers_that_lie_are_refused_and_leave_nothing_behind(source):
    transfer = NixlTransfer(torch.zeros(8, 65536, dtype=torch.uint8), "decode-0", "d")
    try:
        true_peer = source.peer("nixl")
        truth = NixlOffer.decode(true_peer.payload)
        lies = [
            {"metadata": b""},
            {"metadata": truth.metadata[:100]},
            {"agent_name": "somebody/else"},
            {"base_address": truth.base_address + (1 << 30)},
            {"num_blocks": 1 << 20},
        ]
        for lie in lies:
            payload = dataclasses.replace(truth, **lie).encode()
            peer = Peer("prefill-0", "a", true_peer.address, payload)
            with pytest.raises(HandoverError, match="prefill-0"):
                await transfer.pull(peer, "r", [7], [7])
            assert transfer.kv_cache.count_nonzero() == 0
        await transfer.pull(true_peer, "r", [7], [7])
        assert (transfer.kv_cache.numpy()[7] == source.blocks[7]).all()
    finally:
        await transfer.close()


async def test_agents_come_and_go_without_leaving_files_threads_or_descriptors():
    kv_cache = torch.zeros(4, 65536, dtype=torch.uint8)

    async def once() -> tuple[int, int]:
        await NixlTransfer(kv_cache, "decode-0", "d").close()
        # asyncio's own come as it likes.
        pool = [t for t in threading.enumerate() if t.name.startswith("asyncio_")]
        return len(os.listdir("/proc/self/task")) - len(pool), len(os.listdir("/proc/self/fd"))

    files = set(os.listdir("/dev/shm"))
    await once()
    before = await once()
    for _ in range(5):
        after = await once()
    for _ in range(500):  # a thread that was joined may still be on its way out of the kernel
        if after[0] <= before[0]:
            break
        await asyncio.sleep(0.01)
        after = await once()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "ucx" in name]


def test_carrier_is_taken_from_ucx_log():
    log = UcxLog()
    for line in """
[1] ucp_worker.c:1 UCX  INFO    d self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
|  d self cfg#0                                                     |
| remote memory read by ucp_get*(multi) into host memory from host |
| 0..inf | zero-copy   | self/memory                             |
|  d/x intra-node cfg#1                                           |
| remote memory write by ucp_put*(multi) into host memory         |
| 0..inf | zero-copy   | sysv/memory                             |
|  d/x intra-node cfg#1                                           |
| remote memory read by ucp_get*(multi) into host memory from host |
| Range  | Description | Config                                  |
|   0..99 | short       | tcp/lo                                  |
| 100..inf | zero-copy   | cma/memory                              |
|  d/x inter-node cfg#2                                           |
| remote memory read by ucp_get*(multi) into host memory from host |
| 0..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
""".splitlines():
        log._take(line)
    assert log.carriers == {"intra-node": "cma", "inter-node": "rc_mlx5"}


def test_ucx_settings_do_not_leak_into_children(monkeypatch):
    for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO"):
        monkeypatch.delenv(name, raising=False)
    with UcxLog().environment():
        assert os.environ["UCX_LOG_FILE"].startswith("/proc/self/fd/")
    assert not {name for name in os.environ if name.startswith("UCX_LOG")}
    monkeypatch.setenv("UCX_LOG_LEVEL", "debug")
    with UcxLog().environment():
        assert os.environ["UCX_LOG_LEVEL"] == "debug"
        assert "UCX_LOG_FILE" not in os.environ
