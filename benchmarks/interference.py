"""What long prompts do to streams that are being written, on each of some deployments in turn.

    python benchmarks/interference.py [CONFIG ...] [--rounds 3] [--every 3] [--prompt 1024] [--json]

Four clients stream (64 tokens in, 256 out) in a closed loop; all the while a prompt of 1024 tokens
arrives every three seconds and wants one token. The streams' numbers are of the gaps between their
tokens; the prompts' is the time to their token. Each deployment is started fresh and warmed by one
stream and one prompt.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from cli.deployed import deployed  # noqa: E402
from loadgen.client import StreamingClient, Target, server_info  # noqa: E402
from loadgen.length import parse_length  # noqa: E402
from loadgen.prompt import TokenPrompts  # noqa: E402
from loadgen.record import PlannedRequest  # noqa: E402
from loadgen.runner import Run  # noqa: E402
from loadgen.summary import summarize  # noqa: E402
from loadgen.workload import Synthetic, synthetic_requests  # noqa: E402

STREAMS, STREAM_IN, STREAM_OUT = 4, 64, 256
DEFAULT = ("configs/local.yaml", "configs/colocated.yaml")


def plan(count: int, num_in: int, num_out: int, seed: int) -> list[PlannedRequest]:
    lengths = (parse_length(str(num_in), "input"), parse_length(str(num_out), "output"))
    return synthetic_requests(Synthetic(count, *lengths), seed)


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    info = await server_info(url, None, None)
    target = Target(url, info.model, extra={"ignore_eos": True})

    def run(requests: list[PlannedRequest], concurrency: int | None) -> Run:
        return Run(StreamingClient(target), requests, TokenPrompts(), concurrency=concurrency)

    await run(plan(1, STREAM_IN, 32, seed=1), 1).run()
    await run(plan(1, options.prompt, 1, seed=2), 1).run()
    streams = run(plan(STREAMS * options.rounds, STREAM_IN, STREAM_OUT, seed=3), STREAMS)
    # More than the streams will last; they are stopped then.
    prompts = plan(500, options.prompt, 1, seed=4)
    timed = [replace(p, at_s=(i + 0.5) * options.every) for i, p in enumerate(prompts)]
    long = run(timed, None)
    sending = asyncio.create_task(long.run())
    try:
        ours = summarize(await streams.run())
    finally:
        long.stop()
        theirs = summarize(await sending)
    for name, summary in (("streams", ours), ("prompts", theirs)):
        if summary["requests"]["failed"] or not summary["requests"]["ok"]:
            raise SystemExit(f"pdserve: error: {name} failed: {summary['requests']}")
    gaps = ours["itl_s"]
    return {
        "gaps_s": {name: gaps[name] for name in ("p50", "p99", "p99.9", "max")},
        "streams_tokens_per_s": ours["output_tokens_per_s"],
        "prompt_ttft_s": {name: theirs["ttft_s"][name] for name in ("p50", "p99")},
        "num_prompts": theirs["requests"]["ok"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("configs", nargs="*", default=[str(ROOT / name) for name in DEFAULT])
    parser.add_argument("--rounds", type=int, default=3, help="answers of each streaming client")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between long prompts")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a long prompt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for config in options.configs:
        with (
            tempfile.TemporaryDirectory(prefix="pdserve-interference-") as folder,
            deployed(Path(config), (), Path(folder) / "up.log") as running,
        ):
            running.wait_ready()
            found[Path(config).name] = asyncio.run(measure(running.url, options))
    if options.json:
        print(json.dumps(found))
        return
    columns = ("", "gap p50", "p99", "p99.9", "max", "streams' tokens/s", "TTFT of the prompts p50")
    table = Table(*columns)
    for name, row in found.items():
        times = [*row["gaps_s"].values()]
        cells = [f"{1e3 * seconds:.0f} ms" for seconds in times]
        ttft = f"{1e3 * row['prompt_ttft_s']['p50']:.0f} ms ({row['num_prompts']})"
        table.add_row(name, *cells, f"{row['streams_tokens_per_s']:.0f}", ttft)
    Console().print(table)


if __name__ == "__main__":
    main()
