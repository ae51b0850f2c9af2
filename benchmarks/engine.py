"""What one engine step costs: decode at several batch sizes and the prefill of a long prompt.

    python benchmarks/engine.py [--model smollm2-135m] [--threads 1 2] [--rounds 5]
                                [--variants none/auto none/auto/torch int8/auto ...]

A variant is quantization/kv_cache_dtype; with /torch behind it, without the native operations.
All variants are loaded at once and measured in turn, round after round, so that whatever else the
machine does hits all of them alike; medians over the rounds are reported. Attention reads
`--context` tokens, of zeros: values do not change its cost.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from core.model_files import resolve_model  # noqa: E402
from engine import native  # noqa: E402
from engine.attention.base import StepBatch  # noqa: E402
from engine.model.decoder import Decoder  # noqa: E402
from engine.model.load import load_model  # noqa: E402

BLOCK, PROMPT = 16, 1024
BATCHES = (1, 4, 16)
STEPS = 10  # decode steps in a round


class Bench:
    """One variant: a model over a cache that holds the KV of the largest batch."""

    def __init__(self, model: Decoder, context: int) -> None:
        self.model, self.context = model, context
        per_sequence = -(-max(context + 1, PROMPT) // BLOCK)
        num_blocks = max(BATCHES) * per_sequence
        self.tables = [
            list(range(i, num_blocks, max(BATCHES))) for i in range(max(BATCHES))
        ]  # scattered, as in a pool that has been used
        cache = torch.zeros((num_blocks, *model.kv_block_shape(BLOCK)), dtype=model.kv_dtype)
        model.bind(cache)

    def decode(self, batch: int) -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            self._forward(self.tables[:batch], self.context, 1)
        return (time.perf_counter() - start) / STEPS

    def prefill(self) -> float:
        start = time.perf_counter()
        self._forward(self.tables[:1], 0, PROMPT)
        return time.perf_counter() - start

    def _forward(self, tables: list[list[int]], prefix: int, new: int) -> None:
        ids = torch.randint(self.model.config.vocab_size, (len(tables) * new,))
        positions = torch.arange(prefix, prefix + new).repeat(len(tables))
        num_decodes = len(tables) if new == 1 else 0
        lens = [prefix + new] * len(tables)
        batch = StepBatch([new] * len(tables), lens, tables, num_decodes)
        self.model.forward(ids, positions, batch, torch.arange(1, len(tables) + 1) * new - 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="smollm2-135m")
    arguments.add_argument("--dtype", default="auto")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--context", type=int, default=256)
    arguments.add_argument(
        "--variants",
        nargs="+",
        default=["none/auto", "none/auto/torch", "int8/auto", "int4/auto", "none/int8"],
    )
    args = arguments.parse_args()
    files = resolve_model(args.model, progress=print)
    benches = {}
    for variant in args.variants:
        weights, kv, *without = variant.split("/")
        with native.turned_off() if without else nullcontext():
            model = load_model(files, args.dtype, quantization=weights, kv_cache_dtype=kv)
            benches[variant] = Bench(model, args.context)
    print(f"{args.model}, ms a step, {args.context} tokens of context, {args.rounds} rounds")
    decodes = [f"decode {batch}" for batch in BATCHES]
    print(f"| threads | variant | {' | '.join(decodes)} | prefill {PROMPT} |")
    print("|---|---|" + "---|" * (len(decodes) + 1))
    for threads in args.threads:
        torch.set_num_threads(threads)
        for variant, medians in measure(benches, args.rounds).items():
            cells = " | ".join(f"{1000 * value:.1f}" for value in medians)
            print(f"| {threads} | {variant} | {cells} |", flush=True)


def measure(benches: dict[str, Bench], rounds: int) -> dict[str, list[float]]:
    def cases(bench: Bench) -> list[Callable[[], float]]:
        return [*[lambda b=b: bench.decode(b) for b in BATCHES], bench.prefill]

    seen: dict[str, list[list[float]]] = {variant: [] for variant in benches}
    for round_number in range(rounds + 1):
        for variant, bench in benches.items():
            with native.turned_off() if variant.endswith("/torch") else nullcontext():
                seconds = [case() for case in cases(bench)]
            if round_number:  # the first one warms up
                seen[variant].append(seconds)
    return {v: [statistics.median(c) for c in zip(*s, strict=True)] for v, s in seen.items()}


if __name__ == "__main__":
    main()
