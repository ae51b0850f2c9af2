"""From a worker's settings to its engine: which device, how many KV blocks."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.config import EngineConfig
from core.errors import ConfigError, ModelError
from core.host import default_kv_memory
from core.model_files import ModelFiles, resolve_model
from core.worker_settings import WorkerSettings
from engine.attention.base import StepBatch
from engine.cuda_graphs import BYTES_PER_SIZE, DecodeGraphs, graph_sizes
from engine.draft import require_same_vocabulary
from engine.engine import Engine
from engine.model import host_memory
from engine.model.decoder import Decoder
from engine.model.load import load_model
from engine.parallel import RankGroup, TensorParallel
from kv_transfer.layout import KVShape
from worker import memory_budget

logger = logging.getLogger(__name__)

_LONGEST_USEFUL = 1 << 20
_LEAST_IN_HUGE_PAGES = 64 << 20
_FEWEST_TOKENS = 256  # a KV cache for less is an error, unless the model's context is shorter
# What sampling keeps for each row beside the logits: weights, a sort with its indices, sums.
_SAMPLER_COPIES = 8


def build_engine(
    files: ModelFiles,
    settings: WorkerSettings,
    progress: Callable[[str], None],
    ranks: RankGroup | None = None,
) -> tuple[Engine, Decoder]:
    """Loads the model, of `ranks` rank 0's part, and allocates its KV cache. Raises ConfigError,
    ModelError and RankLostError."""
    config = settings.widest_engine
    device = choose_device(config)
    if config.memory_budget is not None and device == "cpu" and ranks is None:
        memory_budget.require_room_for_weights(files, settings.config.dtype, config)
    before = memory_budget.resident_bytes()
    model = _load(files, settings, device, progress, ranks)
    draft = load_draft(settings, files, model, device, progress)
    _move_into_huge_pages(before, device)
    # Who only prefills never decodes, and ranks would have to replay together.
    wants_graphs = (
        device == "cuda" and config.cuda_graphs == "auto" and settings.may_decode and ranks is None
    )
    num_blocks = _num_blocks(model, draft, settings, wants_graphs, progress, ranks)
    graphs = None
    if wants_graphs:
        progress("capturing decode steps as CUDA graphs")
        longest = min(model.config.max_model_len, num_blocks * config.block_size)
        graphs = DecodeGraphs(
            model,
            config.max_num_seqs,
            max_blocks_per_sequence=-(-longest // config.block_size),
            dummy_block=num_blocks,
            device=torch.device(device),
        )
    whole = model if ranks is None else TensorParallel(model, ranks)
    engine = Engine(whole, config, num_blocks, device, draft, graphs)
    engine.set_limits(settings.engine)
    return engine, model


def build_follower(
    files: ModelFiles,
    settings: WorkerSettings,
    ranks: RankGroup,
    progress: Callable[[str], None],
) -> tuple[Decoder, torch.Tensor]:
    """Another rank's part of the model, and its part of as many KV blocks, bound to it."""
    config = settings.widest_engine
    device = choose_device(config)
    before = memory_budget.resident_bytes()
    model = _load(files, settings, device, progress, ranks)
    _move_into_huge_pages(before, device)
    num_blocks = _num_blocks(model, None, settings, False, progress, ranks)
    shape = (num_blocks, *model.kv_block_shape(config.block_size))
    kv_cache = host_memory.zeros(shape, model.kv_dtype, device)
    model.bind(kv_cache)
    return model, kv_cache


def _move_into_huge_pages(bytes_before: int, device: str) -> None:
    """What a load has left behind, unless it is so little that no step would notice."""
    if device == "cpu" and memory_budget.resident_bytes() - bytes_before > _LEAST_IN_HUGE_PAGES:
        host_memory.collapse_into_huge_pages()


def _load(
    files: ModelFiles,
    settings: WorkerSettings,
    device: str,
    progress: Callable[[str], None],
    ranks: RankGroup | None,
) -> Decoder:
    config = settings.widest_engine
    return load_model(
        files,
        settings.config.dtype,
        device=device,
        progress=progress,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        attention=config.attention,
        ranks=ranks,
    )


def _num_blocks(
    model: Decoder,
    draft: Decoder | None,
    settings: WorkerSettings,
    wants_graphs: bool,
    progress: Callable[[str], None],
    ranks: RankGroup | None,
) -> int:
    """As many as every rank has room for."""
    config, device = settings.widest_engine, choose_device(settings.engine)
    num_blocks, memory = config.num_kv_blocks, None
    if device == "cuda":
        if num_blocks is None:
            progress("measuring what a step takes")
            memory = gpu_kv_memory(model, config, wants_graphs)
    elif config.memory_budget is not None:
        progress("measuring what a step takes")
        memory_budget.begin_measuring()
        cache_bytes = run_largest_step(model, config, torch.device(device))
        memory = memory_budget.kv_memory(model, draft, config, cache_bytes)
    elif num_blocks is None:
        memory = settings.kv_memory_bytes or default_kv_memory()
    if num_blocks is None:
        assert memory is not None
        num_blocks = blocks_in(memory, model, config, draft)
    elif memory is not None and num_blocks * block_bytes(model, config, draft) > memory:
        raise ModelError(
            f"engine.num_kv_blocks: {num_blocks} do not fit into engine.memory_budget, which "
            f"leaves room for {max(0, memory) // block_bytes(model, config, draft)}"
        )
    if ranks is not None:
        num_blocks = ranks.least(num_blocks)
    megabytes = num_blocks * block_bytes(model, config, draft) / 1e6
    progress(f"KV cache: {num_blocks} blocks, {megabytes:.0f} MB on {device}")
    return num_blocks


def load_draft(
    settings: WorkerSettings,
    target_files: ModelFiles,
    target: Decoder,
    device: str,
    progress: Callable[[str], None],
) -> Decoder | None:
    """The model of `speculative.method: draft_model`, in the target's types; None where there is
    none, or nothing is decoded. Raises ModelError."""
    config, name = settings.engine, settings.config.draft_model_of(settings.role.value)
    if name is None:
        return None
    files = resolve_model(name, progress=progress)
    require_same_vocabulary(target_files, files)
    draft = load_model(
        files,
        settings.config.dtype,
        device=device,
        progress=lambda text: progress(f"draft model: {text}"),
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        attention=config.attention,
    )
    sizes = draft.config.vocab_size, target.config.vocab_size
    logger.info("draft model %s, %d of %d token ids", files.name, *sizes)
    return draft


def kv_shape(model: Decoder, settings: WorkerSettings) -> KVShape:
    """Of all ranks together; `model` may be any rank's part."""
    config, block_size = model.config, settings.engine.block_size
    num_layers, num_streams, _, _, row = model.kv_block_shape(block_size)
    return KVShape(
        num_layers=num_layers,
        num_streams=num_streams,
        num_kv_heads=config.num_kv_heads,
        row_bytes=row * model.kv_dtype.itemsize,
        block_size=block_size,
        tensor_parallel_size=settings.num_ranks,
        sliding_windows=tuple(layer.sliding_window for layer in config.layers),
    )


def choose_device(config: EngineConfig) -> str:
    """Ray shows a worker the GPUs that its pool's `resources` reserve, and no others. Raises
    ConfigError where a GPU is asked for and none is to be seen."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device: cuda, but this worker sees no GPU; give its pool `resources: {GPU: 1}`"
            " and install a build of torch with CUDA"
        )
    return "cuda"


def block_bytes(model: Decoder, config: EngineConfig, draft: Decoder | None = None) -> int:
    """Of one KV block, and of the draft model's beside it."""
    size = math.prod(model.kv_block_shape(config.block_size)) * model.kv_dtype.itemsize
    return size if draft is None else size + block_bytes(draft, config)


def blocks_in(
    memory: int, model: Decoder, config: EngineConfig, draft: Decoder | None = None
) -> int:
    """How many KV blocks so many bytes hold, and no more than could ever be used. Raises
    ModelError where that is too few for any work."""
    max_len = min(config.max_model_len or model.config.max_model_len, _LONGEST_USEFUL)
    useful = config.max_num_seqs * -(-max_len // config.block_size)
    size = block_bytes(model, config, draft)
    num_blocks = max(0, min(useful, memory // size))
    if num_blocks * config.block_size < min(max_len, _FEWEST_TOKENS):
        raise ModelError(
            f"{memory / 1e6:.0f} MB for the KV cache hold only {num_blocks} blocks of "
            f"{size / 1e6:.2f} MB; free memory, or set engine.max_model_len, or raise "
            "engine.memory_budget if it is set"
        )
    return num_blocks


# ------------------------------------------------------------------------- a GPU's memory


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes, before the KV cache is made."""

    total: int
    free: int  # of the whole device, as its driver says
    reserved: int  # by torch in this process, used or not
    peak: int  # allocated by torch in this process at the height of the largest step

    def kv_budget(self, utilization: float, set_aside: int, own_limit: int | None = None) -> int:
        """What is left for KV blocks; others on the same device and what CUDA itself takes count
        as used. May be negative. `own_limit`: what this process may take, whatever is free."""
        outside = self.total - self.free - self.reserved
        own = int(self.total * utilization) - outside
        return min(own, own_limit or own) - self.peak - set_aside


def gpu_kv_memory(model: Decoder, config: EngineConfig, has_graphs: bool) -> int:
    """Runs the largest step that the limits allow and measures what is left for KV blocks. Raises
    ModelError where not even that fits."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        cache_bytes = run_largest_step(model, config, torch.device("cuda"))
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            "the GPU's memory does not hold the model and one full step; lower "
            "engine.max_num_batched_tokens or engine.max_num_seqs, or quantise"
        ) from error
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - cache_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    memory = GpuMemory(total, free, torch.cuda.memory_reserved(), peak)
    logits = config.max_num_seqs * model.config.vocab_size * 4
    set_aside = _SAMPLER_COPIES * logits
    if has_graphs:
        set_aside += logits + BYTES_PER_SIZE * len(graph_sizes(config.max_num_seqs))
    budget = memory.kv_budget(config.gpu_memory_utilization, set_aside, config.memory_budget)
    logger.info(
        "GPU memory: %.1f GB, %.1f GB taken by model and largest step, %.1f GB for KV blocks",
        total / 1e9, peak / 1e9, budget / 1e9,
    )  # fmt: skip
    return budget


def run_largest_step(model: Decoder, config: EngineConfig, device: torch.device) -> int:
    """One forward of `max_num_batched_tokens` prompt tokens over a KV cache of its own, which is
    gone afterwards. Returns the bytes of that cache. The model is left without one."""
    block_size, total = config.block_size, config.max_num_batched_tokens
    longest = min(config.max_model_len or model.config.max_model_len, model.config.max_model_len)
    lens = [min(longest, total - start) for start in range(0, total, longest)]
    tables, num_blocks = [], 0
    for length in lens:
        count = -(-length // block_size)
        tables.append(list(range(num_blocks, num_blocks + count)))
        num_blocks += count
    shape = (num_blocks, *model.kv_block_shape(block_size))
    cache = torch.zeros(shape, dtype=model.kv_dtype, device=device)
    model.bind(cache)
    ids = torch.zeros(total, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lens])
    rows = torch.arange(min(total, config.max_num_seqs), device=device)
    model.forward(ids, positions, StepBatch(lens, lens, tables, 0), rows)
    model.unbind()
    return cache.nbytes
