"""Every family against transformers, in float32, on tiny random weights: a table of the largest
errors. `make models-check` prints it, and fails if one is beyond its bound.

    python -m support.models_check [FAMILY ...]
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from core.model_files import ModelFiles
from engine.model.load import Dtype, load_model
from kv_transfer.base import Peer
from support.local_transport import LocalNetwork, LocalTransfer
from support.ranks import sharded
from support.tiny_models import (
    FAMILY_CONFIGS,
    PagedRunner,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

LENGTH = 45  # past the window of 8 and the length of 16 that ropes were made for
BLOCK = 4
CHUNKS = [1, 7, BLOCK, BLOCK + 1, 8, 9]  # then one by one
# Of logits that reach about 3.
LOGIT_BOUND = 5e-4


@dataclass(frozen=True)
class Case:
    """One family's files, a prompt, and what transformers says of it."""

    files: ModelFiles
    ids: list[int]
    expected: torch.Tensor  # [LENGTH, vocab]

    def runner(self, dtype: Dtype = "float32", **options: Any) -> PagedRunner:
        return PagedRunner(load_model(self.files, dtype, **options), block_size=BLOCK)

    def error(self, logits: torch.Tensor, start: int = 0) -> float:
        return (logits - self.expected[start:]).abs().max().item()


def logits(case: Case) -> float:
    """The whole prompt at once: position 0 and every other."""
    return case.error(case.runner().chunks(case.ids, [LENGTH]))


def chunked(case: Case) -> float:
    """In chunks that end everywhere, then token by token."""
    return case.error(case.runner().chunks(case.ids, CHUNKS))


def prefix(case: Case) -> float:
    """Blocks of another sequence, and the rest of the prompt computed after them."""
    runner = case.runner()
    runner.step({"first": case.ids})
    errors = []
    for hit in (BLOCK, 5 * BLOCK, LENGTH - 1):
        runner.block_tables[f"hit{hit}"] = list(runner.block_tables["first"])
        runner.lengths[f"hit{hit}"] = hit
        errors.append(case.error(runner.step({f"hit{hit}": case.ids[hit:]}), hit))
    return max(errors)


def mean_kl(case: Case, **options: Any) -> float:
    """Of a model that is narrower than transformers' float32, in nats."""
    right = case.expected.log_softmax(-1)
    ours = case.runner(**options).chunks(case.ids, CHUNKS).log_softmax(-1)
    return (right.exp() * (right - ours)).sum(-1).mean().item()


def two_ranks(case: Case) -> float:
    """The model cut in two, as chunks and as decodes."""
    with sharded(case.files, 2, 96, BLOCK, dtype="float32") as model:
        return case.error(PagedRunner(model, block_size=BLOCK).chunks(case.ids, CHUNKS))


def hand_over(case: Case) -> float:
    """Most of the prompt on one worker, its blocks pulled by another, the rest there."""
    source, target = case.runner(), case.runner()
    split = LENGTH - 15
    source.step({"a": case.ids[:split]})
    pull(source, target, "a", split)
    rest = [target.step({"a": [token]}) for token in case.ids[split:]]
    return case.error(torch.cat(rest), split)


def pull(source: PagedRunner, target: PagedRunner, name: str, num_tokens: int) -> None:
    """The KV of a sequence's first tokens, into blocks of the target's own."""
    target.reserve(name, num_tokens)
    wanted = target.block_tables[name]
    asyncio.run(_pull(source, target, source.block_tables[name][: len(wanted)], wanted))


async def _pull(
    source: PagedRunner, target: PagedRunner, remote: list[int], local: list[int]
) -> None:
    network = LocalNetwork()
    sender = LocalTransfer(network, source.kv_cache, "prefill-0", "p")
    receiver = LocalTransfer(network, target.kv_cache, "decode-0", "d")
    peer = Peer("prefill-0", "p", "", sender.offer())
    await receiver.pull(peer, "a", remote, local)
    await receiver.close()
    await sender.close()


# Of KL with experts in mind: a random router's choices are close calls, and rounding changes some.
COLUMNS: dict[str, tuple[Callable[[Case], float], float]] = {
    "logits": (logits, LOGIT_BOUND),
    "chunked": (chunked, LOGIT_BOUND),
    "prefix": (prefix, LOGIT_BOUND),
    "TP2": (two_ranks, LOGIT_BOUND),
    "hand-over": (hand_over, LOGIT_BOUND),
    "int8 KV (KL)": (partial(mean_kl, kv_cache_dtype="int8"), 0.01),
    "fp8 KV (KL)": (partial(mean_kl, kv_cache_dtype="fp8_e4m3"), 0.04),
    "bf16 (KL)": (partial(mean_kl, dtype="bfloat16"), 0.04),
    "bf16, int8 weights (KL)": (partial(mean_kl, dtype="bfloat16", quantization="int8"), 0.04),
}


def check(family: str, folder: Path, reference: Any = None) -> dict[str, float]:
    """Column -> error. `reference` replaces the model that the files are made of."""
    model = make_tiny(family)
    ids = random_ids(LENGTH)
    expected = reference_logits(reference or model, ids)
    case = Case(save_tiny(model, folder), ids, expected)
    return {name: function(case) for name, (function, _) in COLUMNS.items()}


def beyond(errors: dict[str, float]) -> list[str]:
    """Columns whose error is not within its bound; one that is no number never is."""
    return [name for name, error in errors.items() if not error <= COLUMNS[name][1]]


def main(families: Iterable[str]) -> int:
    torch.set_num_threads(1)
    started = time.monotonic()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"Largest |logit - transformers'| over {LENGTH} positions, float32, or mean KL in nats.")
    print(f"Bounds: {', '.join(f'{name} {bound}' for name, (_, bound) in COLUMNS.items())}.\n")
    print(f"| family | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    failed = []
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            errors = check(family, Path(folder))
        wrong = beyond(errors)
        failed += [f"{family}: {name}" for name in wrong]
        cells = [f"{error:.0e}{' !' * (name in wrong)}" for name, error in errors.items()]
        print(f"| {family} | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")
    if failed:
        print(f"beyond its bound: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FAMILY_CONFIGS))
