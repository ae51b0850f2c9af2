"""What a hand-over costs one request: P/D on two processes of this host against one worker alone.

    python benchmarks/hand_over.py [--model smollm2-135m] [--tokens 128 1024 4096] [--json]

Three workers run as processes: a prefill worker with block checksums, one without, and a decode
worker. One round sends the same number of prompt tokens, never the same tokens, in turn: to the
decode worker alone, which prefills and decodes; to the pair with checksums; to the pair without.
Nothing else is running, so what is measured is the path, not the benefit of separate pools. Times
are of this process, which plays the router: to the first token, and from it to the second. Medians
over the rounds.
"""

import argparse
import asyncio
import base64
import json
import random
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from core.types import GenerationRequest, SamplingParams  # noqa: E402
from rpc import codec, worker_pb2_grpc  # noqa: E402
from rpc import worker_pb2 as pb  # noqa: E402
from rpc.channel import make_channel  # noqa: E402

WAYS = ("alone", "pair", "pair, no checksums")
MAX_TOKENS = 4  # the second token is the last that is looked at


# ---------------------------------------------------------------- a worker process


async def serve(name: str, options: argparse.Namespace) -> None:
    import torch

    from core.config import parse_config
    from core.types import Role
    from core.worker_settings import WorkerSettings
    from decode_worker import DecodeWorker
    from prefill_worker import PrefillWorker

    torch.set_num_threads(options.threads)
    needed = max(options.tokens) + MAX_TOKENS
    config = parse_config(
        f"""
        model: {options.model}
        dtype: {options.dtype}
        engine:
          max_model_len: {needed}
          num_kv_blocks: {2 * (needed // 16 + 2)}
          max_num_batched_tokens: {options.chunk}
          enable_prefix_caching: false
          threads: {options.threads}
        kv_transfer:
          transport: {options.transport}
          checksum: {str(name != "prefill-off").lower()}
        """
    )
    role = Role.DECODE if name == "decode" else Role.PREFILL
    worker = (DecodeWorker if role is Role.DECODE else PrefillWorker)(
        WorkerSettings(worker_id=name, role=role, config=config)
    )
    await worker.start(lambda text: None)
    print(base64.b64encode(worker.info.SerializeToString()).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


# ---------------------------------------------------------------- the router's part


@dataclass
class Sample:
    ttft: float
    first_itl: float
    tail: float = 0.0  # from the commit record to the release
    kv_bytes: int = 0


@dataclass
class Row:
    """Medians, seconds. `added_*`: against the same round's request to one worker alone."""

    tokens: int
    way: str
    ttft: float
    added_ttft: float
    first_itl: float
    added_first_itl: float
    tail: float
    kv_bytes: int
    rounds: int


class Caller:
    def __init__(self, infos: dict[str, pb.WorkerInfo]) -> None:
        self.infos = infos
        self.channels = {name: make_channel(info.address) for name, info in infos.items()}

    async def send(self, request: GenerationRequest, way: str) -> Sample:
        stamps: list[float] = []
        started = pb.DecodeStarted()
        source = {"alone": None, "pair": "prefill-on", "pair, no checksums": "prefill-off"}[way]

        async def read(call: Any) -> None:
            async for event in call:
                match event.WhichOneof("event"):
                    case "first_token":
                        stamps.append(time.monotonic())
                    case "started":
                        if isinstance(event, pb.DecodeEvent):
                            started.CopyFrom(event.started)
                    case "tokens":
                        stamps.extend([time.monotonic()] * len(event.tokens.tokens))

        message = codec.request_to_pb(request)
        decode = pb.DecodeRequest(request=message, incarnation=self.infos["decode"].incarnation)
        legs = []
        began = time.monotonic()
        if source is not None:
            info = self.infos[source]
            decode.source.CopyFrom(
                pb.PeerAddress(
                    worker_id=info.id, address=info.address, incarnation=info.incarnation
                )
            )
            prefill = worker_pb2_grpc.PrefillServiceStub(self.channels[source]).Prefill
            legs.append(
                prefill(
                    pb.PrefillRequest(request=message, incarnation=info.incarnation, hand_over=True)
                )
            )
        legs.append(worker_pb2_grpc.DecodeServiceStub(self.channels["decode"]).Decode(decode))
        await asyncio.gather(*map(read, legs))
        return Sample(
            ttft=stamps[0] - began,
            first_itl=stamps[1] - stamps[0],
            tail=started.kv_tail_seconds,
            kv_bytes=started.kv_bytes,
        )


def make_request(num_tokens: int, rng: random.Random) -> GenerationRequest:
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(rng.randrange(1000, 20_000) for _ in range(num_tokens)),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=0),
    )


async def measure(caller: Caller, tokens: int, rounds: int) -> list[Row]:
    rng = random.Random(tokens)
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):
        ways = WAYS[round_ % 3 :] + WAYS[: round_ % 3]
        for way in ways:
            sample = await caller.send(make_request(tokens, rng), way)
            if round_:  # the first warms up
                samples[way].append(sample)
    return [_row(tokens, way, samples[way], samples["alone"]) for way in WAYS]


def _row(tokens: int, way: str, samples: list[Sample], alone: list[Sample]) -> Row:
    def added(name: str) -> float:
        pairs = zip(samples, alone, strict=True)
        return statistics.median(getattr(a, name) - getattr(b, name) for a, b in pairs)

    return Row(
        tokens=tokens,
        way=way,
        ttft=statistics.median(s.ttft for s in samples),
        added_ttft=added("ttft"),
        first_itl=statistics.median(s.first_itl for s in samples),
        added_first_itl=added("first_itl"),
        tail=statistics.median(s.tail for s in samples),
        kv_bytes=samples[0].kv_bytes,
        rounds=len(samples),
    )


def show(rows: list[Row]) -> None:
    table = Table(title="Cost of a hand-over (ms, medians; added: against the same round alone)")
    for name in ("prompt tokens", "way", "TTFT", "added", "first ITL", "added", "tail", "KV MB"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        times = (row.ttft, row.added_ttft, row.first_itl, row.added_first_itl, row.tail)
        cells = [f"{1000 * value:.1f}" for value in times]
        table.add_row(str(row.tokens), row.way, *cells, f"{row.kv_bytes / 1e6:.1f}")
    Console().print(table)


async def drive(options: argparse.Namespace) -> list[Row]:
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("prefill-on", "prefill-off", "decode")
    }
    try:
        infos = {}
        for name, process in processes.items():
            assert process.stdout is not None
            infos[name] = pb.WorkerInfo.FromString(base64.b64decode(process.stdout.readline()))
        caller = Caller(infos)
        rows = []
        for tokens in options.tokens:
            rows += await measure(caller, tokens, options.rounds)
        for channel in caller.channels.values():
            await channel.close()
        return rows
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in processes.values():
            process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=512, help="tokens in a prefill step")
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--transport", choices=["auto", "nixl", "grpc"], default="auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options))
        return
    rows = asyncio.run(drive(options))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
