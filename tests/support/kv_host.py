"""One host of a deployment as a plain process: a worker, or the router's two legs.

    python -m support.kv_host prefill --model DIR --host IP
    python -m support.kv_host router

A worker prints its WorkerInfo as one line of base64 and serves until stdin ends. The router reads
one JSON command a line and answers with one line: `generate` makes attempts until one succeeds,
each behind the tokens that the one before has emitted, as the real router does.
"""

import argparse
import asyncio
import base64
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rpc import worker_pb2 as pb


@dataclass(frozen=True, eq=False)  # a key by identity, as workers are
class RemoteWorker:
    """As much of a worker as a caller needs."""

    info: pb.WorkerInfo


async def _stdin_lines() -> Any:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line


async def serve(role: str, model: str, host: str) -> None:
    import torch

    from core.types import Role
    from core.worker_settings import WorkerSettings
    from decode_worker import DecodeWorker
    from prefill_worker import PrefillWorker
    from support.pair import tiny_config

    torch.set_num_threads(1)
    config = tiny_config(Path(model), num_kv_blocks=128)
    transfer = config.kv_transfer.model_copy(update={"transport": "grpc"})
    settings = WorkerSettings(
        worker_id=f"{role}-0",
        role=Role(role),
        config=config.model_copy(update={"kv_transfer": transfer}),
        host=host,
    )
    worker = (PrefillWorker if role == "prefill" else DecodeWorker)(settings)
    await worker.start(lambda text: None)
    print(base64.b64encode(worker.info.SerializeToString()).decode(), flush=True)
    async for _ in _stdin_lines():
        pass
    await worker.stop()


async def route() -> None:
    from rpc import worker_pb2_grpc
    from support.pair import Pair, request

    pair: Pair | None = None

    async def status(worker: Any) -> dict[str, int]:
        assert pair is not None
        call = pair.stub(worker_pb2_grpc.WorkerServiceStub, worker).WatchStatus(
            pb.WatchStatusRequest()
        )
        counts = (await call.read()).kv_blocks
        call.cancel()
        return {"held": counts.held, "awaiting": counts.awaiting, "running": counts.running}

    async for line in _stdin_lines():
        command = json.loads(line)
        reply: dict[str, Any] = {}
        match command["do"]:
            case "meet":
                infos = [pb.WorkerInfo.FromString(base64.b64decode(i)) for i in command["workers"]]
                pair = Pair(RemoteWorker(infos[0]), RemoteWorker(infos[1]))  # type: ignore[arg-type]
            case "alone":
                assert pair is not None
                answer = await pair.alone(request(command["prompt"], command["max_tokens"],
                                                  cache_salt="oracle"))  # fmt: skip
                reply = {"tokens": answer.tokens}
            case "generate":
                assert pair is not None
                reply = {"tokens": [], "errors": [], "pull_seconds": 0.0}
                for _ in range(command["attempts"]):
                    attempt = request(command["prompt"], command["max_tokens"],
                                      cache_salt=command["salt"])  # fmt: skip
                    attempt = replace(attempt, output_token_ids=tuple(reply["tokens"]))
                    answer = await pair.generate(attempt, timeout_s=command["timeout_s"])
                    reply["tokens"] += answer.tokens
                    if answer.decode_started is not None:
                        reply["pull_seconds"] += answer.decode_started.kv_transfer_seconds
                    if answer.error is None:
                        break
                    reply["errors"].append(answer.error.message)
            case "status":
                assert pair is not None
                reply = {"prefill": await status(pair.prefill), "decode": await status(pair.decode)}
        print(json.dumps(reply), flush=True)
    if pair is not None:
        for channel in pair.channels.values():
            await channel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["prefill", "decode", "router"])
    parser.add_argument("--model")
    parser.add_argument("--host")
    options = parser.parse_args()
    if options.role == "router":
        asyncio.run(route())
    else:
        asyncio.run(serve(options.role, options.model, options.host))
