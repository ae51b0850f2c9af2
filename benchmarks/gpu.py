"""How near to a GPU's limits the engine's steps come, on random weights of a known shape.

    python benchmarks/gpu.py [--shape llama-3-8b] [--batches 1 8 64] [--context 1024] [--json]
    python benchmarks/gpu.py --shape tiny --device cpu      # the same code, anywhere

Two limits are measured first, on the same device: the bf16 rate of one large matrix product, and
the bandwidth of one large copy (bytes read plus bytes written). Prefill is compared with the first,
decode with the second:

    prefill   floating point operations of the weights and of causal attention, over the time
    decode    bytes of all weights once and of every sequence's KV, over the time of a step

A decode step is all that a greedy step does: inputs from the host, forward, argmax, ids to the
host. Needs no network and no checkpoint. The first run of FlashInfer compiles its kernels, which
is not in any figure.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from engine.attention.base import StepBatch  # noqa: E402
from engine.cuda_graphs import DecodeGraphs  # noqa: E402
from engine.model.decoder import Decoder  # noqa: E402
from engine.model.load import random_model  # noqa: E402
from engine.staging import Staging  # noqa: E402
from engine.step import StepInputs  # noqa: E402

BLOCK = 16
# Of config.json. Llama 3 8B, and something that a CPU runs in a moment.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    flops: float  # of a bf16 product, per second
    bandwidth: float  # of a copy, bytes read and written per second


@dataclass(frozen=True, slots=True)
class Result:
    what: str  # "prefill 4096", "decode 8"
    graphs: str  # "on", "off", or "-" for prefill
    tokens_per_second: float
    share_of_limit: float


class Bench:
    """A model, a KV cache for the largest batch, and the steps to measure."""

    def __init__(self, model: Decoder, device: torch.device, batch: int, context: int, prompt: int):
        self.model, self.device, self.context, self.prompt = model, device, context, prompt
        per_sequence = -(-(context + 1) // BLOCK)
        num_blocks = max(batch * per_sequence, -(-prompt // BLOCK))
        self.tables = [list(range(i, batch * per_sequence, batch)) for i in range(batch)]
        self.prompt_table = list(range(-(-prompt // BLOCK)))
        shape = (num_blocks + 1, *model.kv_block_shape(BLOCK))
        model.bind(torch.zeros(shape, dtype=model.kv_dtype, device=device))
        capture = None if device.type == "cuda" else _as_it_is
        self.graphs = DecodeGraphs(model, batch, per_sequence, num_blocks, device, capture)
        self.graphs.capture_all()
        self.staging = Staging(device, torch.int64, 3 * max(prompt, batch))

    @torch.inference_mode()
    def prefill(self) -> None:
        length = self.prompt
        batch = StepBatch([length], [length], [self.prompt_table], 0)
        self._finish(
            self._forward(StepInputs(batch, [1] * length, list(range(length)), [length - 1]))
        )

    @torch.inference_mode()
    def decode(self, size: int, with_graphs: bool) -> None:
        batch = StepBatch([1] * size, [self.context + 1] * size, self.tables[:size], size)
        inputs = StepInputs(batch, [1] * size, [self.context] * size, list(range(size)))
        self._finish(self.graphs.run(inputs) if with_graphs else self._forward(inputs))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        ids, at, rows = self.staging.put(inputs.input_ids, inputs.positions, inputs.logits_rows)
        return self.model.forward(ids, at, inputs.batch, rows)

    def _finish(self, logits: torch.Tensor) -> None:
        logits.argmax(dim=-1).tolist()  # waits


def _as_it_is(run: Callable[[], None]) -> Callable[[], None]:
    return run


# ------------------------------------------------------------------------- arithmetic


def weight_numbers(values: dict[str, Any]) -> int:
    """Of all matrices that a token meets: the embedding table is looked up, not read."""
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    head_dim = hidden // values["num_attention_heads"]
    kv = values["num_key_value_heads"] * head_dim
    attention = 2 * hidden * hidden + 2 * hidden * kv
    mlp = 3 * hidden * values["intermediate_size"]
    return layers * (attention + mlp) + hidden * values["vocab_size"]


def prefill_flops(values: dict[str, Any], length: int) -> float:
    """Of one prompt; logits of its last token alone, attention over half of the square."""
    head = values["hidden_size"] * values["vocab_size"]
    attention = 4 * values["num_hidden_layers"] * values["hidden_size"] * length * (length + 1) / 2
    return 2 * (weight_numbers(values) - head) * length + 2 * head + attention


def decode_bytes(values: dict[str, Any], batch: int, context: int, itemsize: int) -> int:
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    per_token = 2 * values["num_hidden_layers"] * values["num_key_value_heads"] * head_dim
    return (weight_numbers(values) + batch * (context + 1) * per_token) * itemsize


# -------------------------------------------------------------------------- measuring


def seconds(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    """Of one run, in a row of them."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - started) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_limits(device: torch.device, is_tiny: bool, rounds: int) -> Limits:
    """The best of `rounds`: a limit is what the device can do, not what it does on average."""
    size = 256 if is_tiny else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.zeros((1 << 20) if is_tiny else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = lambda: torch.mm(a, b)  # noqa: E731
    copy = lambda: target.copy_(source)  # noqa: E731
    seconds(device, product, 3), seconds(device, copy, 3)
    return Limits(
        flops=2 * size**3 / min(seconds(device, product, 10) for _ in range(rounds)),
        bandwidth=2 * source.nbytes / min(seconds(device, copy, 10) for _ in range(rounds)),
    )


def measure(args: argparse.Namespace) -> tuple[Limits, list[Result]]:
    device = torch.device(args.device)
    values, is_tiny = SHAPES[args.shape], args.shape == "tiny"
    limits = measure_limits(device, is_tiny, args.rounds)
    model = random_model(values, "bfloat16", args.device, attention=args.attention)
    bench = Bench(model, device, max(args.batches), args.context, args.prompt)
    cases: list[tuple[str, str, int, Callable[[], None], int]] = [
        (f"prefill {args.prompt}", "-", args.prompt, bench.prefill, 1)
    ]
    for size in args.batches:
        for with_graphs in (False, True):
            if with_graphs and not bench.graphs.fits(StepBatch([1], [1], [[0]], 1)):
                continue
            run = lambda size=size, g=with_graphs: bench.decode(size, g)  # noqa: E731
            cases.append((f"decode {size}", "on" if with_graphs else "off", size, run, args.steps))
    times: list[list[float]] = [[] for _ in cases]
    for round_number in range(args.rounds + 1):
        for case_times, (*_, run, repeats) in zip(times, cases, strict=True):
            taken = seconds(device, run, repeats)
            if round_number:  # the first one warms up
                case_times.append(taken)
    results = []
    for case_times, (what, graphs, tokens, _, _) in zip(times, cases, strict=True):
        taken = statistics.median(case_times)
        if graphs == "-":
            share = prefill_flops(values, args.prompt) / taken / limits.flops
        else:
            moved = decode_bytes(values, tokens, args.context, model.kv_dtype.itemsize)
            share = moved / taken / limits.bandwidth
        results.append(Result(what, graphs, tokens / taken, share))
    return limits, results


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--attention", choices=("auto", "torch", "flashinfer"), default="auto")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    arguments.add_argument("--context", type=int, default=1024, help="tokens of KV a sequence")
    arguments.add_argument("--prompt", type=int, default=4096, help="tokens of the prefill")
    arguments.add_argument("--steps", type=int, default=20, help="decode steps in a round")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--json", action="store_true")
    args = arguments.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("pdserve: error: no GPU here; --shape tiny --device cpu runs the same code")
    limits, results = measure(args)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    if args.json:
        found = {"device": name, "shape": args.shape, "context": args.context}
        print(json.dumps({**found, **asdict(limits), "results": [asdict(r) for r in results]}))
        return
    print(f"{name}, {args.shape}, bf16, {args.context} tokens of context, {args.rounds} rounds")
    rate, bandwidth = limits.flops / 1e12, limits.bandwidth / 1e9
    print(f"matrix product {rate:.2f} TFLOP/s, copy {bandwidth:.0f} GB/s\n")
    print("| | CUDA graphs | tokens/s | share of the limit |")
    print("|---|---|---|---|")
    for r in results:
        print(f"| {r.what} | {r.graphs} | {r.tokens_per_second:.0f} | {r.share_of_limit:.1%} |")


if __name__ == "__main__":
    main()
