"""Holds the planner against published results: `python -m benchmarks.planner_published DATA`.

DATA is a folder with traces/ and perf/; docs/planning.md names the files and their sources. Prints
what was claimed, what the simulation gives and a verdict.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.planner_distserve import distserve
from benchmarks.planner_splitwise import splitwise
from benchmarks.published_row import Row, rows_of, within
from engine.block_pool import BlockPool, Owner
from planner.fit import DecodePoint, PrefillPoint, fit
from planner.layout import Layout, Pool
from planner.machines import Capability, build
from planner.result import Slo, percentile
from planner.search import Goal, Searcher
from planner.simulate import Options, simulate
from planner.trace import Trace, TraceRequest, load_trace


def main(folder: Path) -> None:
    checks: tuple[Callable[[Path], Iterator[Row]], ...] = (
        mooncake_hits, sarathi_chunks, silicon, distserve, splitwise, prefix_reuse,
    )  # fmt: skip
    print("| what | published | simulated | verdict |\n|---|---|---|---|")
    for check in checks:
        for row in check(folder):
            print("| " + " | ".join(row) + " |", flush=True)


# ------------------------------------------------------------------- Mooncake


def hit_rate(trace: Trace, num_blocks: int) -> float:
    """Share of the trace's blocks that the engine's own block pool finds, one request at a time."""
    pool = BlockPool(num_blocks)
    hits = total = 0
    for request in trace.requests:
        hashes = request.hashes[:num_blocks]
        found = pool.find(hashes)
        pool.share(found, Owner.RUNNING)
        table = found + pool.allocate(len(hashes) - len(found), Owner.RUNNING)
        for block_id, value in zip(table, hashes, strict=True):
            pool.register(block_id, value)
        pool.free(table, Owner.RUNNING)
        hits += len(found)
        total += len(request.hashes)
    return hits / total


def mooncake_hits(folder: Path) -> Iterator[Row]:
    published = {
        "conversation": {1_000: 0.045, 10_000: 0.21, 30_000: 0.33, 50_000: 0.35, 400_000: 0.366},
        "synthetic": {400_000: 0.640},
    }
    for name, rates in published.items():
        trace = load_trace(folder / f"traces/mooncake_{name}.jsonl.gz")
        for blocks, rate in rates.items():
            ours = hit_rate(trace, blocks)
            verdict = within(ours, rate, 0.03)
            yield f"Mooncake {name}: hits, {blocks} blocks", f"{rate:.1%}", f"{ours:.1%}", verdict


# -------------------------------------------------------------------- Sarathi


def sarathi_chunks(folder: Path) -> Iterator[Row]:
    """Fitted on the single steps of figure 2; figure 9's chunked prefills are then predicted."""
    perf = folder / "perf/sarathi-serve-osdi"
    rows = rows_of(perf / "figure-9_chunking-overhead.csv")
    times = {
        (int(r["prefill_length"]), int(r["chunk_size"])): float(r["prefill_execution_time"]) / 1e3
        for r in rows
    }
    lengths = sorted({length for length, _ in times})
    whole = [
        PrefillPoint(1, int(r["batch_num_tokens"]), 0, float(r["batch_execution_time"]))
        for r in rows_of(perf / "figure-2_prefill.csv")
    ]
    decodes = [
        DecodePoint(int(float(r["batch_size"])), 1024, float(r["batch_execution_time"]))
        for r in rows_of(perf / "figure-2_decode.csv")
    ]
    model = fit(whole, decodes).model
    for length in lengths:
        for chunk in (512, 1024, 2048):
            ours = 0.0
            for start in range(0, length, chunk):
                n = min(chunk, length - start)
                ours += model.step(n, n * start + n * n / 2, 0, 0)
            ratio = ours / model.step(length, length * length / 2, 0, 0)
            measured = times[length, chunk] / times[length, 16384]
            yield (
                f"Sarathi: prefill of {length} in chunks of {chunk}, over whole",
                f"{measured:.2f}",
                f"{ratio:.2f}",
                within(ratio, measured, 0.1),
            )


# ---------------------------------------------------- measured on real GPUs


def silicon(folder: Path) -> Iterator[Row]:
    """Closed loops on one engine, against measured TTFT and TPOT."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(folder / "perf/aiconfigurator/silicon_sample.csv"):
        case = _silicon_case(row)
        if case is None:
            continue
        name, capability, layout, request, concurrency = case
        trace = Trace((request,) * max(4 * concurrency, 32))
        result = simulate(layout, capability.machine, trace, Options(concurrency=concurrency))
        ttft = sum(result.recorder.ttft) / len(result.recorder.ttft)
        tpot = median(result.recorder.tpot)
        groups.setdefault(name, []).append(
            (ttft * 1e3 / float(row["silicon_ttft_ms"]), tpot * 1e3 / float(row["silicon_tpot_ms"]))
        )
    for name, pairs in groups.items():
        for index, what in enumerate(("TTFT", "TPOT")):
            ratios = sorted(pair[index] for pair in pairs)
            near = sum(abs(r - 1) <= 0.25 for r in ratios) / len(ratios)
            yield (
                f"{name}: {what}, {len(ratios)} points",
                "measured",
                f"x{median(ratios):.2f} (p10 x{percentile(ratios, 10):.2f}, "
                f"p90 x{percentile(ratios, 90):.2f})",
                f"{near:.0%} within 25 percent",
            )


def _silicon_case(
    row: dict[str, str],
) -> tuple[str, Capability, Layout, TraceRequest, int] | None:
    known = {"meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "Qwen/Qwen3-32B": "qwen3-32b"}
    model, system = known.get(row["model_path"]), row["system"].split("_")[0]
    # No precision is given for the bf16 models; a weight of 2 bytes fits their times.
    if model is None or row["mode"] != "agg" or row["precision"] or row["gemm_quant_mode"]:
        return None
    if row["pp_size"] not in ("", "1") or system not in ("a100", "h100", "h200"):
        return None
    tp = int(row["tp_size"])
    capability = build(system, model, tp, max_num_seqs=1024)
    if tp not in capability.degrees or capability.sources[tp] != "fitted":
        return None
    request = TraceRequest(0.0, int(row["isl"]), int(row["osl"]))
    layout = Layout(colocated=Pool(1, tp), max_num_batched_tokens=8192)
    return (f"{model} on {system} TP{tp}", capability, layout, request, int(row["batch_size"]))


# ----------------------------------------------------- evidence against a split


def prefix_reuse(folder: Path) -> Iterator[Row]:
    """Known from practice: with much reuse, or light load, one pool often wins."""
    trace = load_trace(folder / "traces/mooncake_synthetic.jsonl.gz").first(1500)
    for what, candidate in (
        ("much prefix reuse (Mooncake synthetic)", trace),
        ("the same without its prefixes", replace(trace, hash_block=0, requests=tuple(
            replace(r, hashes=()) for r in trace.requests
        ))),
    ):  # fmt: skip
        goal = Goal(Slo(5.0, 0.05), requests=1500)
        searcher = Searcher(build("h100", "llama-3.1-8b", 8), candidate, goal)
        best = {f.layout.is_disaggregated: f for f in searcher.plan(8).best}
        one, two = best[False], best[True]
        yield (
            f"8 x H100, Llama-3.1-8B, TTFT 5 s, TPOT 50 ms, {what}",
            "one pool often wins" if candidate.hash_block else "-",
            f"one pool {one.goodput:.2f} ({one.layout}, hits {one.at_goodput.hit_rate:.0%}), "
            f"two {two.goodput:.2f} ({two.layout}, hits {two.at_goodput.hit_rate:.0%}) req/s",
            "one pool wins" if one.goodput > two.goodput else "the split wins",
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.planner_published DATA")
    main(Path(sys.argv[1]))
