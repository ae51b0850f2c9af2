"""What router, gRPC and the engine's own Python cost while 16 streams are written.

    python -m benchmarks.overhead [--rounds 3]

In turn, on the same cores, each in fresh processes, SmolLM2-135M in bfloat16:

    alone   decode steps of the model for 16 sequences and nothing around them: threads, cores and
            huge pages as in a worker, KV blocks scattered, the context that streams have on average
    live    `pdserve up configs/colocated.yaml` and 16 streams through its router, 128 tokens in,
            192 out: the gaps between tokens while all 16 are written and no prompt is read

Two answers. "Of the gap" is 1 - alone / live, of medians; the sampler is in it, and the client,
which shares the cores. "Own CPU" is what router and worker themselves compute for a step, ms, and
its share of a gap: all threads of the router, those of the worker that do not compute, and the
engine's Python, by which its thread is longer at work than those that compute beside it (with one
thread alone it cannot be told, and is left out). CPU: ms for each token, of all threads, waiting in
a loop included; the worker's is what goes beyond the model alone. "Others" is what everybody else
used of the cores, Ray included.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cli.bench_options import run_async
from cli.deployed import Deployed, deployed
from cli.state import running_deployments
from cluster.process_tree import descendants
from core.host import available_cpus
from loadgen.client import StreamingClient, Target
from loadgen.prompt import TokenPrompts
from loadgen.record import RequestRecord, Segment

CONFIG = Path(__file__).parents[1] / "configs/colocated.yaml"
MODEL = "smollm2-135m"
STREAMS, NUM_IN, NUM_OUT = 16, 128, 192
STEPS, WARM_UP = 150, 20
COLUMNS = ("step alone ms", "gap live ms", "of the gap %", "own CPU ms", "own CPU %", "CPU: model",
           "worker beyond", "router", "client", "others, alone %", "others, live %")  # fmt: skip
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def threads_s(pid: int) -> dict[str, tuple[float, float]]:
    """Of each thread of a process: how long it ran, and how long it waited for a processor."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            run, wait, _ = (thread / "schedstat").read_text().split()
            found[thread.name] = int(run) / 1e9, int(wait) / 1e9
    return found


def cpu_s(pid: int) -> float:
    return sum(run for run, _ in threads_s(pid).values())


def beside_computing_s(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
) -> float:
    """Of a worker in which a thread for each core computes, the engine's own among them: CPU of the
    others, and the time by which the engine's is longer at work than the rest of those."""
    threads = available_cpus()
    grown = [(run - before[name][0], wait - before[name][1])
             for name, (run, wait) in after.items() if name in before]  # fmt: skip
    grown.sort(reverse=True)
    others = sum(run for run, _ in grown[threads:])
    at_work = sorted(run + wait for run, wait in grown[:threads])
    return others + at_work[-1] - statistics.mean(at_work[:-1] or at_work)


def busy_s() -> float:
    """Of all cores together; what a hypervisor gave to others counts too."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S


def alone(threads: int) -> dict[str, float]:
    """Runs in a process of its own, which does what a worker does before and after loading."""
    os.environ.update(OMP_NUM_THREADS=str(threads), GOMP_SPINCOUNT="3000")  # before torch comes
    import torch

    from benchmarks import engine as steps
    from core.model_files import resolve_model
    from engine import native
    from engine.model import host_memory
    from engine.model.load import load_model

    torch.set_num_threads(threads)
    steps.STEPS = 1  # one by one, as the gaps are
    bench = steps.Bench(load_model(resolve_model(MODEL), "bfloat16"), NUM_IN + NUM_OUT // 2)
    host_memory.collapse_into_huge_pages()
    native.settle_threads()
    for _ in range(WARM_UP):
        bench.decode(STREAMS)
    start, cpu, busy = time.perf_counter(), time.process_time(), busy_s()
    seconds = [bench.decode(STREAMS) for _ in range(STEPS)]
    busy, cpu = busy_s() - busy, time.process_time() - cpu
    all_s = (time.perf_counter() - start) * threads
    return {
        "step alone ms": 1e3 * statistics.median(seconds),
        "CPU: model": 1e3 * cpu / (STEPS * STREAMS),
        "others, alone %": 100 * max(0.0, busy - cpu) / all_s,
    }


async def live(running: Deployed) -> dict[str, float]:
    (worker,) = [entry["pid"] for entry in running.cluster()["workers"]]
    up = next(found.pid for found in running_deployments() if found.url == running.url)
    (router,) = [
        process.pid for process in descendants(up)
        if b"\0router\0" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    ]  # fmt: skip
    pids = {"worker": worker, "router": router, "client": os.getpid()}
    client = StreamingClient(Target(running.url, MODEL, extra={"ignore_eos": True}, timeout_s=100))
    await streams(client, "warm", 32, pids)
    return await streams(client, "measured", NUM_OUT, pids)


async def streams(
    client: StreamingClient, name: str, num_out: int, pids: dict[str, int]
) -> dict[str, float]:
    """All at once, with prompts that no other name's begin like."""

    def use() -> dict[str, float]:
        return {"busy": busy_s(), **{who: cpu_s(pid) for who, pid in pids.items()}}

    async def until(num_tokens: int, which: type[min] | type[max]) -> None:
        """The slowest stream, or the fastest, has so many tokens, or one has ended."""
        while which(len(record.token_times_s) for record in records) < num_tokens:
            if any(record.ended_s for record in records):
                return
            await asyncio.sleep(0.01)

    prompts = [TokenPrompts().make([Segment(f"{name} {i}", NUM_IN)]) for i in range(STREAMS)]
    records = [RequestRecord(i, 0.0) for i in range(STREAMS)]
    pairs = zip(prompts, records, strict=True)
    sending = asyncio.gather(*(client.send(client.target.body(p, num_out), r) for p, r in pairs))
    await until(1, min)
    before, start, worker_before = use(), time.perf_counter(), threads_s(pids["worker"])
    await until(num_out - 4, max)
    worker_after, end, after = threads_s(pids["worker"]), time.perf_counter(), use()
    await sending
    times = [[t for t in record.token_times_s if start <= t <= end] for record in records]
    gaps = [b - a for stream in times for a, b in pairwise(stream)]
    wrong = [
        f"{r.error} {r.output_tokens}" for r in records if r.error or r.output_tokens != num_out
    ]
    if wrong or not gaps:
        raise SystemExit(f"pdserve: error: {len(wrong)} of {STREAMS} streams went wrong: {wrong}")
    used = {who: after[who] - before[who] for who in after}
    others = used.pop("busy") - sum(used.values())
    own = used["router"] + beside_computing_s(worker_before, worker_after)
    steps = sum(map(len, times)) / STREAMS
    return {
        "gap live ms": 1e3 * statistics.median(gaps),
        "own CPU ms": 1e3 * own / steps,
        "others, live %": 100 * max(0.0, others) / ((end - start) * available_cpus()),
        **{who: 1e3 * seconds / sum(map(len, times)) for who, seconds in used.items()},
    }


def one_round(threads: int) -> dict[str, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        found = own.submit(alone, threads).result()
    overrides = ("dtype=bfloat16", f"pools.colocated.engine.threads={threads}")
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-overhead-") as folder,
        deployed(CONFIG, overrides, Path(folder) / "up.log") as running,
    ):
        running.wait_ready()
        found |= run_async(live(running))
    found["worker beyond"] = found["worker"] - found["CPU: model"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads = available_cpus()
    rows = [one_round(threads) for _ in range(options.rounds)]
    rows.append({name: statistics.median(row[name] for row in rows) for name in rows[0]})
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    print(f"python {' '.join(sys.orig_argv[1:])}: {MODEL}, {STREAMS} streams, {threads} threads,",
          cpu[0].split(": ")[1] if cpu else "unknown processor")  # fmt: skip
    table = Table("round", *COLUMNS)
    for number, row in enumerate(rows, start=1):
        row["of the gap %"] = 100 * (1 - row["step alone ms"] / row["gap live ms"])
        row["own CPU %"] = 100 * row["own CPU ms"] / row["gap live ms"]
        cells = [f"{row[name]:.{1 if '%' in name else 2}f}" for name in COLUMNS]
        table.add_row("median" if number == len(rows) else str(number), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
