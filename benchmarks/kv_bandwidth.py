"""How fast KV blocks move between two processes of this host, against one memcpy.

    python benchmarks/kv_bandwidth.py [--json] [--transports nixl grpc] [--blocks 1 16 256 2048]

A source process holds the blocks; this one pulls them, scattered, through the project's own
transports. One round measures memcpy (one thread, the same bytes at the same places, block by
block) and each transport once, in turn, so that whatever else the machine does hits all of them
alike; medians over the rounds are reported. CPU seconds are of both processes together.
"""

import argparse
import asyncio
import base64
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from kv_transfer.base import KVTransfer, Peer  # noqa: E402
from kv_transfer.checksum import block_checksums  # noqa: E402
from kv_transfer.grpc_transport import (  # noqa: E402
    GrpcTransfer,
    add_kv_service,
    stream_blocks,
)
from kv_transfer.memory import use_huge_pages  # noqa: E402
from kv_transfer.nixl_transport import NixlTransfer  # noqa: E402

GOALS = {"nixl": 0.55, "grpc": 0.1}  # of memcpy, from GOAL_BLOCKS blocks on
GOAL_BLOCKS = 256
KIB = 1024


@dataclass
class Row:
    """Medians of one transport at one shape."""

    transport: str
    carrier: str
    block_bytes: int
    blocks: int
    seconds: float
    gb_per_s: float
    of_memcpy: float  # rate relative to memcpy's, the median of each round's own ratio
    cpu_s_per_gb: float
    rounds: int


def make_cache(num_blocks: int, size: int, value: int) -> torch.Tensor:
    cache = torch.empty(num_blocks, size, dtype=torch.uint8)
    use_huge_pages(cache)
    return cache.fill_(value)


# ---------------------------------------------------------------- the source process


async def serve(num_blocks: int, size: int) -> None:
    from rpc import worker_pb2_grpc
    from rpc.channel import make_server

    cache = make_cache(num_blocks, size, 3)
    nixl, grpc = NixlTransfer(cache, "source", "a"), GrpcTransfer(cache)  # as a worker has them

    class Service(worker_pb2_grpc.KvServiceServicer):
        async def Pull(self, request, context):
            async for piece in stream_blocks(cache, request):
                yield piece

    server = make_server()
    add_kv_service(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    payload = base64.b64encode(nixl.offer()).decode()
    print(json.dumps({"address": f"127.0.0.1:{port}", "nixl": payload}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it
    await server.stop(0)
    await nixl.close()
    await grpc.close()


# ---------------------------------------------------------------- the measuring process


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memcpy(target: torch.Tensor, source: torch.Tensor, to: list[int], origin: list[int]) -> None:
    size = target.shape[1]
    to_base, from_base = target.data_ptr(), source.data_ptr()
    for i, j in zip(to, origin, strict=True):
        ctypes.memmove(to_base + i * size, from_base + j * size, size)


async def measure(size: int, counts: list[int], names: list[str], seconds: float) -> list[Row]:
    most = max(counts)
    source = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(most), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert source.stdout is not None and source.stdin is not None
    transfers: dict[str, KVTransfer] = {}
    try:
        hello = json.loads(source.stdout.readline())
        cache, origin = make_cache(most, size, 1), make_cache(most, size, 2)
        if "nixl" in names:
            transfers["nixl"] = NixlTransfer(cache, "target", "a")
        if "grpc" in names:
            transfers["grpc"] = GrpcTransfer(cache)
        peers = {
            name: Peer("source", "a", hello["address"], base64.b64decode(hello["nixl"]))
            for name in transfers
        }
        rows = []
        for count in counts:
            rows += await measure_count(source.pid, cache, origin, transfers, peers, count, seconds)
        return rows
    finally:
        for transfer in transfers.values():
            await transfer.close()
        source.stdin.close()
        source.wait(30)
        source.stdout.close()


async def measure_count(
    source_pid: int,
    cache: torch.Tensor,
    origin: torch.Tensor,
    transfers: dict[str, KVTransfer],
    peers: dict[str, Peer],
    count: int,
    seconds: float,
) -> list[Row]:
    """Rounds for about `seconds`, at least 7; the first is not counted."""
    most, size = cache.shape
    total = count * size
    random = np.random.default_rng(count)
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", *transfers)}
    cpu = dict.fromkeys(times, 0.0)
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < 8 or time.monotonic() < end:
        to = random.permutation(most)[:count].tolist()
        of = random.permutation(most)[:count].tolist()
        for name in times:
            cpu_before = cpu_seconds(os.getpid()) + cpu_seconds(source_pid)
            start = time.perf_counter()
            if name == "memcpy":
                memcpy(cache, origin, to, of)
            else:
                await transfers[name].pull(peers[name], "r", of, to)
            elapsed = time.perf_counter() - start
            if rounds:
                times[name].append(elapsed)
                cpu[name] += cpu_seconds(os.getpid()) + cpu_seconds(source_pid) - cpu_before
        rounds += 1
    rows = []
    for name, samples in times.items():
        ratios = [copy / own for copy, own in zip(times["memcpy"], samples, strict=True)]
        median = statistics.median(samples)
        rows.append(
            Row(
                transport=name,
                carrier=transfers[name].carrier(peers[name]) if name in transfers else "",
                block_bytes=size,
                blocks=count,
                seconds=median,
                gb_per_s=total / median / 1e9,
                of_memcpy=statistics.median(ratios),
                cpu_s_per_gb=cpu[name] / (len(samples) * total / 1e9),
                rounds=len(samples),
            )
        )
    return rows


def checksum_rate(size: int) -> float:
    """GB/s of `block_checksums` over 64 MiB."""
    cache = make_cache((64 << 20) // size, size, 1)
    ids = list(range(len(cache)))
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        block_checksums(cache, ids)
        samples.append(time.perf_counter() - start)
    return cache.numel() / statistics.median(samples) / 1e9


async def idle_cpu(seconds: float) -> float:
    """Share of one core that a registered NIXL agent uses while nothing is asked of it."""
    transfer = NixlTransfer(make_cache(16, 65536, 0), "idle", "a")
    await asyncio.sleep(0.2)
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    await transfer.close()
    return share


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="KV blocks between two processes of this host")
    for heading in ("block", "blocks", "transport", "time", "GB/s", "of memcpy", "CPU s/GB", ""):
        table.add_column(heading, justify="left" if heading in ("transport", "") else "right")
    for row in rows:
        goal = GOALS.get(row.transport) if row.blocks >= GOAL_BLOCKS else None
        verdict = "" if goal is None else ("ok" if row.of_memcpy >= goal else f"below {goal:g}")
        carrier = f" ({row.carrier})" if row.carrier else ""
        table.add_row(
            f"{row.block_bytes // KIB} KiB",
            str(row.blocks),
            row.transport + carrier,
            f"{row.seconds * 1e3:.2f} ms",
            f"{row.gb_per_s:.2f}",
            f"{row.of_memcpy:.2f}",
            # Below a few clock ticks the kernel's counter says nothing.
            f"{row.cpu_s_per_gb:.2f}" if row.blocks >= 16 else "",
            verdict,
            end_section=row.transport == list(GOALS)[-1],
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--transports", nargs="+", default=["nixl", "grpc"], choices=list(GOALS))
    parser.add_argument("--blocks", nargs="+", type=int, default=[1, 16, 256, 2048])
    parser.add_argument("--block-kib", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=5.0, help="per shape")
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        asyncio.run(serve(*options.serve))
        return
    rows: list[Row] = []
    for kib in options.block_kib:
        rows += asyncio.run(measure(kib * KIB, options.blocks, options.transports, options.seconds))
    rates = {kib: checksum_rate(kib * KIB) for kib in options.block_kib}
    idle = asyncio.run(idle_cpu(2.0))
    if options.json:
        report = {
            "rows": [asdict(row) for row in rows],
            "checksum_gb_per_s": rates,
            "nixl_idle_cpu": idle,
        }
        print(json.dumps(report, indent=1))
        return
    console = Console()
    show(console, rows)
    for kib, rate in rates.items():
        console.print(f"checksums of {kib} KiB blocks: {rate:.1f} GB/s, one thread")
    console.print(f"an idle NIXL agent: {idle:.1%} of a core")


if __name__ == "__main__":
    main()
