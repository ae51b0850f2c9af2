"""A colocated worker within a memory budget, under load, in a process of its own:

    python budget_worker.py MODEL_FOLDER BYTES_ABOVE_NOW

Prints JSON: the budget, the peak of resident memory since then, KV blocks and how many were used.
"""

import asyncio
import json
import sys
from pathlib import Path

import torch

from core.types import Role
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.channel import make_channel
from support.pair import prompt, request, start_worker, tiny_config
from worker.memory_budget import begin_measuring, peak_bytes, resident_bytes

NUM_REQUESTS, PROMPT, OUTPUT = 40, 120, 12


async def run(folder: Path, above: int) -> dict[str, int]:
    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)
    begin_measuring()
    budget = resident_bytes() + above
    options = {"num_kv_blocks": "null", "max_num_batched_tokens": 512, "memory_budget": budget}
    config = tiny_config(folder, **options)
    worker = await start_worker(config, Role.COLOCATED)
    channel = make_channel(worker.info.address)
    stub = worker_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
    fewest_free = worker.info.num_kv_blocks

    async def generate(index: int) -> int:
        call = pb.DecodeRequest(
            request=codec.request_to_pb(
                request(prompt(PROMPT, seed=index), OUTPUT, temperature=1.0, seed=index)
            ),
            incarnation=worker.info.incarnation,
        )
        return sum([len(event.tokens.tokens) async for event in stub.Decode(call)])

    async def watch() -> None:
        nonlocal fewest_free
        while True:
            counts = await worker.runtime.run_on_engine(lambda e: e.block_counts())
            fewest_free = min(fewest_free, counts.free)
            await asyncio.sleep(0)  # between any two steps: all blocks are in use for a few alone

    watching = asyncio.create_task(watch())
    num_tokens = sum(await asyncio.gather(*map(generate, range(NUM_REQUESTS))))
    watching.cancel()
    await channel.close()
    blocks, size = worker.info.num_kv_blocks, worker.info.kv_block_bytes
    await worker.stop()
    return {"budget": budget, "peak": peak_bytes(), "num_blocks": blocks, "block_bytes": size,
            "fewest_free": fewest_free, "num_tokens": num_tokens}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))))
