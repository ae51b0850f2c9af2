"""What the router costs: fake workers that answer at once behind it, streams in front of it.

    python benchmarks/router.py [--streams 1 64 512] [--tokens 128] [--itl 20] [--json]

Three processes: the router, on a core of its own where there are two, the fake workers
(router_fakes.py), and this one, the client, on the others. Each
token is one of its worker's steps. For each number of concurrent streams, two loads:

    at once   the workers answer at once: requests and tokens a second of the wall clock, and of
              the router's CPU time, which other processes of a busy machine do not change
    paced     a token every --itl milliseconds, as from a real decode worker, and streams that
              begin one after the other, not all in one moment: the time to the first token (the
              prefill takes none) and of each later one from the worker's send to the client's
              receive, gRPC and HTTP included; and memory for an open stream

"Direct" is the same time to the first token without a router, by gRPC from the prefill worker.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # not before this folder: this file is called like the package

import uvloop  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from router_load import Request, load  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from rpc import cluster_pb2, cluster_pb2_grpc  # noqa: E402
from rpc import worker_pb2 as pb  # noqa: E402
from rpc import worker_pb2_grpc as pb_grpc  # noqa: E402
from rpc.channel import make_channel  # noqa: E402

_READY_S = 60.0
_LEAST_FOR_MEMORY = 64
_HISTORY = 1000  # requests whose timelines a router keeps
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Result:
    """One load at one concurrency. Latencies in milliseconds."""

    kind: str
    streams: int
    requests: int
    requests_per_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float  # of the router process
    cpu_share: float  # of one core
    direct_ttft_p50: float
    ttft_p50: float
    ttft_p99: float
    token_p50: float  # from the worker's send to the client's receive, all but the first
    token_p99: float
    writes_per_token: float
    kb_per_stream: float | None


class Router:
    """The router process, as the kernel sees it."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port = pid, port

    def cpu_s(self) -> float:
        """Of all its threads, to the nanosecond: none of them ends in between."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def rss(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE


def make_model(folder: Path) -> None:
    """Nothing but a tokenizer whose ids are byte values: a router needs no more of a model."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab |= {chr(256 + position): byte for position, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen]:
    """A child that ends with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@contextlib.asynccontextmanager
async def serving(options: argparse.Namespace, itl: float) -> AsyncIterator[tuple[Router, str]]:
    """A fresh router in front of fresh fakes. Yields it and the controller's address."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder)
        config = folder / "config.yaml"
        port = free_port()
        config.write_text(
            f"model: {folder}\nserved_model_name: bench\nrouter: {{http: '127.0.0.1:{port}', "
            f"grpc: '127.0.0.1:{free_port()}', max_concurrent_requests: 4096}}\n"
        )
        fakes = stack.enter_context(
            process(
                sys.executable,
                "benchmarks/router_fakes.py",
                "--itl",
                str(itl),
                "--steps" if options.steps else "--no-steps",
            )  # fmt: skip
        )
        assert fakes.stdout is not None
        controller = fakes.stdout.readline().strip()
        child = stack.enter_context(
            process(
                sys.executable, *(options.under or ["-m", "router"]),
                "--config", str(config), "--controller", controller,
            )
        )  # fmt: skip
        await ready(port)
        if options.core is not None:
            for thread in Path(f"/proc/{child.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {options.core})
        yield Router(child.pid, port), controller


def core_for_the_router() -> int | None:
    """Everything that this process starts shares the other cores. Real clients are on other
    machines: their reading does not push a router off its core after each write. None: there is
    one core for all."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    os.sched_setaffinity(0, cores[:-1])
    return cores[-1]


async def ready(port: int) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b" 200 " in answer.partition(b"\r\n")[0]:
                return
        await asyncio.sleep(0.1)
    raise SystemExit("the router is not ready")


async def measure(
    router: Router, controller: str, kind: str, num_streams: int, options: argparse.Namespace
) -> Result:
    is_paced = kind == "paced"
    if num_streams >= _LEAST_FOR_MEMORY:  # what a router keeps of requests that have ended
        await load("127.0.0.1", router.port, "bench", 32, _HISTORY, 4, "fill", 0.0)
    num_requests = 3 * num_streams if is_paced else max(num_streams, options.requests)
    spread_s = options.tokens * options.itl / 1000 if is_paced else 0.0
    tokens, where = options.tokens, ("127.0.0.1", router.port, "bench")
    await load(*where, min(num_streams, 16), min(num_streams, 16), 4, "warm", 0.0)
    direct = [1e3 * await direct_ttft(controller) for _ in range(50)]
    await sent(controller)
    rss, cpu, began = router.rss(), router.cpu_s(), time.monotonic()
    running = asyncio.ensure_future(
        load(*where, num_streams, num_requests, tokens, "run", spread_s)
    )
    peak = rss
    while not running.done():
        await asyncio.wait({running}, timeout=0.1)
        peak = max(peak, router.rss())
    wall, cpu = time.monotonic() - began, router.cpu_s() - cpu
    requests = running.result()
    times = await sent(controller)
    total = sum(len(request.arrived) for request in requests)
    if total != num_requests * tokens:
        raise SystemExit(f"{total} tokens came, not {num_requests * tokens}")
    ttfts = [1e3 * (request.arrived[0] - request.started) for request in requests]
    added = [1e3 * gap for request in requests for gap in late(request, times[request.id])]
    return Result(
        kind, num_streams, num_requests, num_requests / wall, total / wall, total / cpu, cpu / wall,
        percentile(direct, 50),
        percentile(ttfts, 50), percentile(ttfts, 99), percentile(added, 50), percentile(added, 99),
        sum(request.num_writes for request in requests) / total,
        (peak - rss) / 1e3 / num_streams if num_streams >= _LEAST_FOR_MEMORY else None,
    )  # fmt: skip


def late(request: Request, times: list[float]) -> Iterator[float]:
    """Seconds that each token but the first was on its way."""
    for arrived, at in list(zip(request.arrived, times, strict=True))[1:]:
        yield arrived - at


async def sent(controller: str) -> dict[str, list[float]]:
    async with make_channel(controller) as channel:
        report: Any = await channel.unary_unary("/bench.Fakes/Sent")(b"")
        return json.loads(report)


async def direct_ttft(controller: str) -> float:
    """Seconds to the first token of a prefill worker that is asked by gRPC."""
    async with make_channel(controller) as channel:
        views = cluster_pb2_grpc.ClusterServiceStub(channel).Watch(cluster_pb2.WatchRequest())
        address = (await views.read()).workers[0].address
        views.cancel()
    request = pb.PrefillRequest(
        incarnation="prefill",
        request=pb.GenerationRequest(request_id="direct", prompt_token_ids=[1] * 20),
    )
    async with make_channel(address) as channel:
        stub = pb_grpc.PrefillServiceStub(channel)
        for _ in range(2):  # the first one opens the connection
            began = time.monotonic()
            call = stub.Prefill(request)
            await call.read()
            await call.read()
            took = time.monotonic() - began
            call.cancel()
    return took


def percentile(values: list[float], p: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[p - 1]


async def run(options: argparse.Namespace) -> list[Result]:
    results = []
    for kind in options.kinds:
        for num_streams in options.streams:
            async with serving(options, options.itl if kind == "paced" else 0.0) as at:
                results.append(await measure(*at, kind, num_streams, options))
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def show(results: list[Result]) -> None:
    table = Table("load", "streams", "req/s", "tokens/s", "tokens per CPU s", "core", "TTFT direct",
                  "p50", "p99", "token p50", "p99 (ms)", "writes/token", "KB/stream")  # fmt: skip
    for r in results:
        table.add_row(
            r.kind, str(r.streams), f"{r.requests_per_s:.0f}", f"{r.tokens_per_s:,.0f}",
            f"{r.tokens_per_cpu_s:,.0f}", f"{r.cpu_share:.0%}", 
            f"{r.direct_ttft_p50:.1f}", f"{r.ttft_p50:.1f}",
            f"{r.ttft_p99:.1f}", f"{r.token_p50:.2f}", f"{r.token_p99:.2f}",
            f"{r.writes_per_token:.2f}",
            "" if r.kb_per_stream is None else f"{r.kb_per_stream:.0f}",
        )  # fmt: skip
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--requests", type=int, default=512, help="of the load at once, at least")
    parser.add_argument("--itl", type=float, default=20.0, help="of the paced load, milliseconds")
    parser.add_argument("--kinds", nargs="+", default=["at once", "paced"])
    parser.add_argument(
        "--steps", action=argparse.BooleanOptionalAction, default=True,
        help="tokens of all streams in one message a step, or each in a message of its own",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--under", nargs="+", help="run the router under these arguments of python, a profiler's"
    )
    options = parser.parse_args()
    options.core = core_for_the_router()
    results = uvloop.run(run(options))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
