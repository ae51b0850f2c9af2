"""DistServe's claim: the rate per GPU at which 90 percent attain their SLO."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.published_row import Row
from planner.batch_worker import Limits
from planner.deployment import Link
from planner.fitted import DISTSERVE, DISTSERVE_KV_TOKENS
from planner.hardware import find_hardware, find_model
from planner.machines import Capability
from planner.result import Slo, percentile
from planner.search import Found, Goal, Searcher, layouts
from planner.simulate import Machine
from planner.step_model import FittedModel, StepModel
from planner.trace import Trace, load_trace, sampled


def distserve(folder: Path) -> Iterator[Row]:
    """Per-GPU rate at 90 percent, against the vLLM of then, which runs whole prompts first; and
    against what the paper does not have: a pool of these, and chunked prefill."""
    lengths = load_trace(folder / "traces/sharegpt_8k_lengths.csv.gz", rate=1.0).requests
    # OPT reads 2048 tokens. The median prompt that is left has to be known to compare anything.
    usable = [r for r in lengths if r.num_prompt + r.num_output <= 2048]
    trace = sampled(usable, 4000, 1.0)
    prompts = [float(r.num_prompt) for r in trace.requests]
    spread = "/".join(f"{percentile(prompts, p):.0f}" for p in (50, 90, 99))
    for model, slo, old_tp in (("opt-13b", Slo(0.25, 0.1), 1), ("opt-66b", Slo(0.4, 0.1), 4)):
        degrees = tuple(tp for _, name, tp in DISTSERVE if name == model and tp != 3)
        goal = Goal(slo, requests=1500)
        split = _best(_opt(model, degrees, chunked=True), trace, goal, disaggregated=True)
        chunked = _best(_opt(model, degrees, chunked=True), trace, goal, disaggregated=False)
        vllm = _opt(model, (old_tp,), chunked=False, models=_vllm_2023(folder, model))
        old = _best(vllm, trace, goal, disaggregated=False, gpus=old_tp)
        pool = _best(vllm, trace, goal, disaggregated=False)
        # The paper's baseline is also a slower engine: the same comparison without that.
        equal = _opt(model, (old_tp,), chunked=False)
        old_equal = _best(equal, trace, goal, disaggregated=False, gpus=old_tp)
        pool_equal = _best(equal, trace, goal, disaggregated=False)
        for name, other in (
            ("one vLLM of 2023", old),
            ("a pool of these behind one router", pool),
            ("one engine as fast as DistServe's, whole prompts", old_equal),
            ("a pool of these", pool_equal),
            ("a pool as fast, with chunked prefill", chunked),
        ):
            what = f"DistServe {model}, ShareGPT to 2048 (prompts p50/90/99 {spread}) over {name}"
            if split is None or other is None:
                yield what, "-", "no rate attains the SLO", "not comparable"
                continue
            gain = split.per_gpu / other.per_gpu
            verdict = "a gain" if gain > 1.1 else "no gain: one pool wins here"
            if other is old:
                verdict = (
                    "reproduced"
                    if old_equal is not None and split.per_gpu / old_equal.per_gpu >= 4.4
                    else "not as an effect of the split: see the row with equal engines"
                )
            yield (
                what,
                "up to 7.4x (arXiv 4.48x)" if other is old else "not in the paper",
                f"{gain:.2f}x: {split.per_gpu:.2f} ({split.layout}) against "
                f"{other.per_gpu:.2f} ({other.layout}) req/s a GPU",
                verdict,
            )


def _vllm_2023(folder: Path, model: str) -> dict[int, StepModel]:
    """Steps of the vLLM that the paper compares with, as its authors fitted them."""
    path = folder / "perf/distserve/profiler-a100-80g.vllm.json"
    content = json.loads(path.read_text(encoding="utf-8"))[f"facebook/{model}"]
    models: dict[int, StepModel] = {}
    for tp, entry in content.items():
        prefill = entry["prefill"]
        small, large = entry["decoding_smallbs"], entry["decoding_largebs"]
        models[int(tp)] = FittedModel(
            prefill[0], prefill[1], 2 * prefill[2], small[0], small[2], small[1],
            entry["decoding_large_small_bs_threshold"], (large[0], large[2], large[1]),
        )  # fmt: skip
    return models


def _opt(
    model: str,
    degrees: Sequence[int],
    chunked: bool,
    models: Mapping[int, StepModel] | None = None,
) -> Capability:
    shape = find_model(model)
    machine = Machine(
        model_of=lambda _, tp: models[tp] if models else DISTSERVE["a100", model, tp],
        limits_of=lambda _, tp: Limits(
            DISTSERVE_KV_TOKENS["a100", model, tp], max_num_seqs=256, chunked=chunked
        ),
        # DistServe keeps the two sides of a pair in one node: NVLink.
        link_of=lambda _: Link(
            find_hardware("a100").peer_bandwidth, 0.0005, shape.kv_bytes_per_token
        ),
    )
    return Capability(model, machine, tuple(degrees), dict.fromkeys(degrees, "fitted"))


def _best(
    capability: Capability, trace: Trace, goal: Goal, disaggregated: bool, gpus: int = 8
) -> Found | None:
    """The highest rate for each GPU with at most so many, whole or not."""
    searcher = Searcher(capability, trace, goal)
    best: Found | None = None
    sizes = range(1, gpus + 1)
    kinds = {c for n in sizes for c in layouts(n, capability.degrees)}
    kind = [c for c in kinds if c.is_disaggregated == disaggregated]
    for layout in sorted(kind, key=lambda c: (-searcher.bound(c) / c.gpus, c.gpus, str(c))):
        floor = best.per_gpu * layout.gpus if best else 0.0
        if searcher.bound(layout) * 1.25 > floor:
            best = searcher.goodput(layout, floor) or best
    return best
