"""How long the router thinks about one request: `python -m benchmarks.placement [WORKERS]`.

Half of the workers prefill, half decode; all have reported a load. Prompts have 1024 blocks, of
which all workers hold the first 128, a tenth of them 512. Prints microseconds by policy, for a
placement and for the check whether there is room.
"""

import asyncio
import random
import sys
from time import perf_counter

from core.block_hash import block_hashes, short_hash
from core.types import Role
from router.placement.placer import Placer
from router.placement.policy import POLICIES, Demand
from router.placement.registry import Registry
from rpc import codec, worker_pb2
from rpc.cluster_pb2 import ClusterView, WorkerEntry

BLOCK = 16
NUM_BLOCKS = 16_384
ROUNDS = 300


def registry_of(num_workers: int, names: list[int]) -> Registry:
    """Workers that have said everything there is to say; nobody listens at their addresses."""
    registry = Registry("127.0.0.1:9", (Role.PREFILL, Role.DECODE))
    dice = random.Random(0)
    entries = [
        WorkerEntry(
            id=f"worker-{index}",
            role=codec.role_to_pb(Role.DECODE if index % 2 else Role.PREFILL),
            state=worker_pb2.WORKER_STATE_READY,
            address="127.0.0.1:9",
            incarnation=f"incarnation-{index}",
        )
        for index in range(num_workers)
    ]
    registry.apply(ClusterView(workers=entries))
    prefills = [entry.incarnation for entry in entries if entry.role == worker_pb2.ROLE_PREFILL]
    for index, worker in enumerate(registry.workers.values()):
        worker._learn(
            worker_pb2.WorkerInfo(
                incarnation=worker.incarnation,
                compatibility={"dtype": "bfloat16", "block_size": str(BLOCK), "model": "a"},
                block_size=BLOCK,
                num_kv_blocks=NUM_BLOCKS,
                kv_block_bytes=1 << 20,
                max_num_seqs=256,
                prefix_caching=True,
                max_batched_tokens=2048,
            )
        )
        status = worker_pb2.WorkerStatus(
            state=worker_pb2.WORKER_STATE_READY,
            kv_blocks=worker_pb2.KvBlockCounts(total=NUM_BLOCKS, free=dice.randrange(NUM_BLOCKS)),
            requests_running=dice.randrange(100),
            waiting_prefill_tokens=dice.randrange(20_000),
            prefill_tokens_per_second=dice.uniform(5_000, 20_000),
            decode_step_seconds=0.02,
            decode_sequence_seconds=0.0003,
        )
        if worker.role is Role.DECODE:
            for peer in prefills:
                status.links.add(peer_incarnation=peer, bytes_per_second=dice.uniform(1e9, 4e10))
        worker._report(status)
        held = names[: 512 if index % 10 == 0 else 128]
        assert worker.holdings is not None
        worker.holdings.apply(worker_pb2.KvBlockEvents(is_snapshot=True, stored=held))
    return registry


async def main(num_workers: int) -> None:
    tokens = list(range(1024 * BLOCK))
    names = [short_hash(value) for value in block_hashes(tokens, BLOCK)]
    registry = registry_of(num_workers, names)
    demand = Demand(len(tokens), 256, BLOCK, session="somebody")
    for policy in POLICIES:
        placer = Placer(registry, policy, max_local_tokens=0)
        times = []
        for _ in range(ROUNDS):
            started = perf_counter()
            assert placer.look(demand, names) is not None
            times.append(perf_counter() - started)
        print(f"{policy:14} {_summary(times)}")
    times = []
    for _ in range(ROUNDS):
        started = perf_counter()
        placer.has_room()
        times.append(perf_counter() - started)
    print(f"{'has_room':14} {_summary(times)}")
    await registry.close()


def _summary(times: list[float]) -> str:
    times = sorted(times)
    p50, p99 = (times[int(len(times) * share)] for share in (0.5, 0.99))
    return f"p50 {1e6 * p50:6.0f} us   p99 {1e6 * p99:6.0f} us"


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
