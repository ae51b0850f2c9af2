"""A NIXL worker pair seen from a fresh process, since UCX takes its settings when it is loaded.

Run as a script: pulls from a peer process, stops it with SIGSTOP in the middle of pulls, lets it
go on, and prints what was seen as one JSON line.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_BLOCKS, SIZE = 128, 64 * 1024


async def watch(stalls: bool) -> dict:
    import torch

    from core.errors import HandoverError
    from kv_transfer.base import TransferInDoubt
    from kv_transfer.nixl_transport import NixlTransfer
    from support.kv_peer import PeerProcess

    torch.set_num_threads(1)
    ids = list(range(NUM_BLOCKS))
    seen: dict = {}
    source = PeerProcess(num_blocks=NUM_BLOCKS, size=SIZE)
    other = None
    if stalls:
        other = PeerProcess("prefill-1", seed=1, num_blocks=NUM_BLOCKS, size=SIZE)
    kv_cache = torch.zeros(NUM_BLOCKS, SIZE, dtype=torch.uint8)
    transfer = NixlTransfer(kv_cache, "decode-0", "d", liveness_s=1.0, cancel_s=0.3)
    try:
        peer = source.peer("nixl")
        await transfer.pull(peer, "r", ids, ids)
        seen["equal"] = bool((kv_cache.numpy() == source.blocks).all())
        seen["carrier"] = transfer.carrier(peer)
        before = time.process_time(), time.monotonic()
        await asyncio.sleep(1)
        after = time.process_time(), time.monotonic()
        seen["idle_cpu"] = (after[0] - before[0]) / (after[1] - before[1])
        if other is not None:
            source.send_signal(signal.SIGSTOP)
            try:
                await transfer.pull(peer, "r", ids, ids)
            except TransferInDoubt as error:
                seen["doubt"], quiet = error.message, error.quiet
            seen["quiet_while_stopped"] = quiet.is_set()
            try:
                await transfer.pull(peer, "r", ids, ids)
            except HandoverError as error:
                seen["second"] = error.message
            await transfer.pull(other.peer("nixl"), "r", ids, ids)
            seen["other_peer"] = bool((kv_cache.numpy() == other.blocks).all())
            source.send_signal(signal.SIGCONT)
            await asyncio.wait_for(quiet.wait(), 20)
            kv_cache.zero_()
            await asyncio.sleep(0.1)
            seen["late_bytes"] = int(kv_cache.count_nonzero())
            await transfer.pull(peer, "r", ids, ids)
            seen["again"] = bool((kv_cache.numpy() == source.blocks).all())
            source.send_signal(signal.SIGSTOP)
            pull = asyncio.create_task(transfer.pull(peer, "r", ids, ids))
            await asyncio.sleep(0.1)
            pull.cancel()
            await asyncio.wait({pull}, timeout=20)
            error = None if pull.cancelled() else pull.exception()
            seen["cancelled"] = type(error).__name__
            source.kill()
            await asyncio.wait_for(error.quiet.wait(), 20)
            seen["quiet_after_kill"] = error.quiet.is_set()
    finally:
        source.close()
        if other is not None:
            other.close()
        await transfer.close()
    seen["shm"] = sorted(name for name in os.listdir("/dev/shm") if "ucx" in name)
    return seen


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    print(json.dumps(asyncio.run(watch("stalls" in sys.argv))))
