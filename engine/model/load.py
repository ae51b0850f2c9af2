"""From model files to a Decoder.

Every parameter is allocated once (`allocation`), and each tensor of the checkpoint is copied into
its rows; what is quantised or packed takes its place as soon as it is whole. A tensor that is
missing, unexpected or of another shape is refused by name; nothing is ever left at random.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch

from core.errors import ModelError
from core.model_files import ModelFiles
from engine.attention.kv_format import PADDING_OF_16, KVCacheDtype, KVFormat
from engine.attention.select import AttentionChoice
from engine.model.allocation import Allocation
from engine.model.config import ModelConfig, parse_config
from engine.model.decoder import Decoder
from engine.model.fp8_weights import BlockFp8Source, is_block_fp8
from engine.model.gguf_weights import GGUFSource
from engine.model.host_memory import freeing_at_once
from engine.model.quantised import Quantization
from engine.model.sharding import Shard
from engine.model.weights import SafetensorsSource, WeightSource
from engine.parallel import RankGroup

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PROGRESS_STEPS = 20
_RANDOM_STD = 0.02
_NAMED_IN_ERRORS = 5
# Config keys that say nothing about what a model computes.
_VOLATILE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
# Tensors that a text decoder does not need: derived buffers, and the eyes of a wrapper model.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\bvision_tower\.|\bmulti_modal_projector\.")


def load_model(
    files: ModelFiles,
    dtype: Dtype = "auto",
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
    max_model_len: int | None = None,
    quantization: Quantization = "none",
    kv_cache_dtype: KVCacheDtype = "auto",
    attention: AttentionChoice = "auto",
    ranks: RankGroup | None = None,
) -> Decoder:
    """Loads a checkpoint, of which a rank of `ranks` reads its own part. `max_model_len` shortens
    the model's own context (a longrope model then uses its short factors). Raises ModelError with
    one line that says what is wrong."""
    source = open_source(files)
    config = parse_config(source.config, max_model_len)
    shard = Shard() if ranks is None else Shard(ranks.rank, ranks.size)
    shard.check_heads(config.num_heads, config.num_kv_heads)
    where = torch.device(device)
    chosen = choose_dtype(dtype, where)
    with torch.inference_mode(), freeing_at_once():
        allocation = Allocation(config, chosen, where, shard)
        allocation.plan(quantization)
        _fill(allocation, source, config, progress)
        allocation.finish(source.norms_include_offset)
    return Decoder(
        config,
        allocation.weights,
        chosen,
        where,
        _fingerprint(source),
        quantization,
        _kv_format(kv_cache_dtype, chosen, where),
        attention,
        ranks,
    )


def random_model(
    values: dict[str, Any],
    dtype: Dtype = "auto",
    device: str = "cpu",
    kv_cache_dtype: KVCacheDtype = "auto",
    attention: AttentionChoice = "auto",
) -> Decoder:
    """A model of the shape that `values`, a config.json, says, with weights made on the device:
    to measure with, where no checkpoint is. Raises ModelError."""
    config, where = parse_config(values), torch.device(device)
    chosen = choose_dtype(dtype, where)
    generator = torch.Generator(where).manual_seed(0)
    with torch.inference_mode():
        allocation = Allocation(config, chosen, where, Shard())
        allocation.plan("none")
        for name in list(allocation.targets):
            for view, _ in allocation.targets[name].pieces:
                if view.dim() == 1:  # of a norm, or a bias
                    view.fill_(1.0)
                else:
                    view.normal_(0.0, _RANDOM_STD, generator=generator)
            allocation.filled(name)
        allocation.finish(norms_include_offset=True)
    return Decoder(
        config,
        allocation.weights,
        chosen,
        where,
        "random",
        "none",
        _kv_format(kv_cache_dtype, chosen, where),
        attention,
    )


def _kv_format(name: KVCacheDtype, dtype: torch.dtype, device: torch.device) -> KVFormat:
    is_padded = name == "fp8_e4m3" and device.type == "cuda"  # FlashInfer reads it in place
    return KVFormat(name, dtype, PADDING_OF_16 if is_padded else 0)


def open_source(files: ModelFiles) -> WeightSource:
    if files.format == "gguf":
        return GGUFSource(files.path)
    path = files.path / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return (BlockFp8Source if is_block_fp8(config) else SafetensorsSource)(files.path, config)


def fingerprint(files: ModelFiles) -> str:
    """Digest of a checkpoint's config, tensor names, shapes and types, and of a few bytes of
    every tensor: cheap, the same on every machine, another for another model."""
    return _fingerprint(open_source(files))


def _fingerprint(source: WeightSource) -> str:
    config = {
        key: value
        for key, value in source.config.items()
        if key not in _VOLATILE_KEYS and value is not None
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(source.shapes):
        digest.update(f"{name} {source.shapes[name]} ".encode() + source.sample(name))
    return digest.hexdigest()[:32]


def choose_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32. Raises ModelError when
    the device cannot compute in what was asked for."""
    if dtype == "auto":
        if device.type == "cpu":
            features = torch.cpu.get_capabilities()
            has_bfloat16 = features.get("avx512_bf16") or features.get("amx_bf16")
        else:
            has_bfloat16 = torch.cuda.is_bf16_supported()
        chosen = torch.bfloat16 if has_bfloat16 else torch.float32
        logger.info("dtype auto: %s on %s", str(chosen).removeprefix("torch."), device)
        return chosen
    chosen = _DTYPES[dtype]
    try:
        one = torch.ones(1, 1, dtype=chosen, device=device)
        torch.softmax(torch.nn.functional.linear(one, one), -1)
    except RuntimeError as error:
        raise ModelError(f"dtype {dtype} cannot be computed on {device}: {error}") from error
    logger.info("dtype %s on %s", dtype, device)
    return chosen


def _fill(
    allocation: Allocation,
    source: WeightSource,
    config: ModelConfig,
    progress: Callable[[str], None] | None,
) -> None:
    """Copies every tensor of the source into its target."""
    targets = allocation.targets
    ignored = ["lm_head.weight"] if config.tie_word_embeddings else []
    names = {name: _canonical(name) for name in source.shapes}
    wanted = {name: own for name, own in names.items() if own in targets}
    _refuse("missing", set(targets) - set(wanted.values()))
    owns = Counter(wanted.values())
    _refuse("given twice", {name for name, own in wanted.items() if owns[own] > 1})
    mtp_layers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    prefixes = tuple(f"model.layers.{i}." for i in mtp_layers)
    surplus = {
        name
        for name, own in names.items()
        if name not in wanted and not _IGNORED.search(name) and not own.startswith(prefixes)
    }
    _refuse("unexpected", {name for name in surplus if names[name] not in ignored})
    for name, own in wanted.items():
        if source.shapes[name] != targets[own].shape:
            raise ModelError(
                f"tensor {name} has shape {list(source.shapes[name])}, "
                f"expected {list(targets[own].shape)}"
            )
    total = sum(part.num_own for part in targets.values())
    done = reported = 0
    for name, tensor in source.read(allocation.dtype):
        if name not in wanted:
            continue
        own_part = targets[wanted[name]]
        own_part.fill(tensor, source.is_mapped)
        done += own_part.num_own
        del own_part, tensor  # they hold memory that `filled` may free
        allocation.filled(wanted[name])
        step = done * _PROGRESS_STEPS // total
        if progress is not None and step > reported:
            reported = step
            progress(f"loading weights {100 * done // total}%")


def _canonical(name: str) -> str:
    """The text model's names without those of a wrapper around it."""
    name = re.sub(r"^(model\.)?language_model\.(?=model\.|lm_head\.)", "", name)
    return re.sub(r"^(model\.)?language_model\.", "model.", name)


def _refuse(what: str, names: set[str]) -> None:
    if names:
        first = ", ".join(sorted(names)[:_NAMED_IN_ERRORS])
        more = ", ..." if len(names) > _NAMED_IN_ERRORS else ""
        count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
        raise ModelError(f"checkpoint: {count} {what}: {first}{more}")
