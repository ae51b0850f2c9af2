"""What quantisation costs in quality: perplexity of a fixed text, and how far each position's
distribution is from that of the plain weights and cache.

    python benchmarks/perplexity.py [--model smollm2-135m] [--text FILE] [--dtype bfloat16]

The text follows the beginning of Moby-Dick (Herman Melville, 1851; public domain). It is read in
chunks, so that most keys and values are read back from the cache.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from core.model_files import resolve_model  # noqa: E402
from engine.attention.base import StepBatch  # noqa: E402
from engine.attention.kv_format import KVCacheDtype  # noqa: E402
from engine.model.decoder import Decoder  # noqa: E402
from engine.model.load import load_model  # noqa: E402
from engine.model.quantised import Quantization  # noqa: E402
from router.text.tokenizer import load_tokenizer  # noqa: E402

TEXT = ROOT / "tests" / "data" / "moby_dick.txt"
BLOCK, CHUNK = 16, 64
VARIANTS: list[tuple[Quantization, KVCacheDtype]] = [
    ("none", "auto"), ("int8", "auto"), ("int4", "auto"),
    ("none", "int8"), ("none", "fp8_e4m3"), ("int8", "int8"), ("int4", "int8"),
]  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="smollm2-135m")
    arguments.add_argument("--text", type=Path, default=TEXT)
    arguments.add_argument("--dtype", default="auto")
    args = arguments.parse_args()
    files = resolve_model(args.model, progress=print)
    ids = load_tokenizer(files).encode(args.text.read_text(encoding="utf-8"))
    print(f"{args.model}, {len(ids)} tokens of {args.text.name}")
    print("| weights | KV cache | perplexity | change | mean KL, nats |\n|---|---|---|---|---|")
    plain: torch.Tensor | None = None
    for weights, kv in VARIANTS:
        model = load_model(files, args.dtype, quantization=weights, kv_cache_dtype=kv)
        logprobs = read(model, ids).log_softmax(-1)
        plain = logprobs if plain is None else plain
        value, before = perplexity(logprobs, ids), perplexity(plain, ids)
        kl = (plain.exp() * (plain - logprobs)).sum(-1).mean().item()
        print(f"| {weights} | {kv} | {value:.3f} | {value / before - 1:+.2%} | {kl:.5f} |")


def perplexity(logprobs: torch.Tensor, ids: list[int]) -> float:
    right = torch.tensor(ids[1:]).unsqueeze(1)
    return logprobs[:-1].gather(1, right).mean().neg().exp().item()


def read(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits of every position."""
    num_blocks = -(-len(ids) // BLOCK)
    cache = torch.zeros((num_blocks, *model.kv_block_shape(BLOCK)), dtype=model.kv_dtype)
    model.bind(cache)
    logits = []
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        end = start + len(chunk)
        batch = StepBatch([len(chunk)], [end], [list(range(num_blocks))], 0)
        rows = torch.arange(len(chunk))
        logits.append(model.forward(torch.tensor(chunk), rows + start, batch, rows))
    return torch.cat(logits)


if __name__ == "__main__":
    main()
