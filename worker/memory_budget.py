"""How much of `engine.memory_budget` is left for KV blocks, on a CPU: by measuring, not guessing.

Everything that is resident in the process counts: interpreter and libraries, weights, what a step
takes at its height, KV blocks.
"""

import logging
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ModelError
from core.model_files import ModelFiles
from engine.model.decoder import Decoder
from engine.model.load import open_source

logger = logging.getLogger(__name__)

# Sequences, outputs, messages on their way, compiled grammars, and what the C library keeps of
# what was freed.
_SET_ASIDE = 128 << 20
_BYTES_PER_WEIGHT = {"none": 0.0, "int8": 1.0, "int4": 0.625}  # 0: as the dtype
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


def require_room_for_weights(files: ModelFiles, dtype: str, config: EngineConfig) -> None:
    """Raises ModelError if the weights alone would pass the budget, before they are read."""
    budget = config.memory_budget
    assert budget is not None
    source = open_source(files)
    count = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    weights = int(count * (_BYTES_PER_WEIGHT[config.quantization] or _DTYPE_BYTES[dtype]))
    resident = resident_bytes()
    if resident + weights > budget:
        raise ModelError(
            f"engine.memory_budget: {budget / 1e6:.0f} MB hold neither the weights of {files.name} "
            f"(about {weights / 1e6:.0f} MB) nor anything else beside what the process has already "
            f"({resident / 1e6:.0f} MB); raise it, quantise, or take a smaller model"
        )


def begin_measuring() -> None:
    """What was resident at most is counted anew from here on."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:  # the peak of loading then counts: less is left for KV
        logger.info("the peak of memory cannot be reset (%s): KV blocks get less", error)


def kv_memory(model: Decoder, draft: Decoder | None, config: EngineConfig, cache_bytes: int) -> int:
    """Bytes for KV blocks, after the largest step was run over a cache of `cache_bytes` since
    `begin_measuring`. May be negative."""
    budget = config.memory_budget
    assert budget is not None
    peak = peak_bytes() - cache_bytes
    set_aside = _SET_ASIDE + _sampler_bytes(model, config)
    left = budget - peak - set_aside
    # Reading keys and values copies those of one layer, of sequences padded to at most twice
    # their length, in the type of the computation.
    part = 1 / (1 + max(_copied_share(each) for each in (model, draft) if each is not None))
    logger.info(
        "memory budget %.0f MB: %.0f MB taken by model and largest step, %.0f MB set aside, "
        "%.0f MB for KV blocks", budget / 1e6, peak / 1e6, set_aside / 1e6, left * part / 1e6,
    )  # fmt: skip
    return int(left * part)


def _sampler_bytes(model: Decoder, config: EngineConfig) -> int:
    """Logits of every row that a step may sample from, and what sampling makes of them."""
    guesses = 0 if config.speculative is None else config.speculative.num_tokens
    rows = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + guesses))
    return 6 * rows * model.config.vocab_size * 4


def _copied_share(model: Decoder) -> float:
    shape = model.kv_block_shape(1)
    stored = shape[-1] * model.kv_dtype.itemsize
    computed = min(stored, shape[-1]) * model.dtype.itemsize
    return 2 * max(1.0, computed / stored) / shape[0]


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024
