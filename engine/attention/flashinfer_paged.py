"""Paged attention on a GPU through FlashInfer (Ye et al., arXiv:2501.01005).

The library's pages are our blocks. Its HND layout, `[pages, kv_heads, page_size, head_dim]` for
keys and as much for values, is a strided view of one layer of our cache, which it reads in place.
Its own words stay in this file:

    block tables   [7, 2, 9], [4]     of sequences with 35 and 16 tokens, 16 in a block
    indices        7 2 9 4            all blocks, one sequence after the other
    indptr         0 3 4              where each sequence's blocks start and end
    last_page_len  3 16               tokens in the last block, 1 ... block_size
    window_left                       tokens before its own that a query sees; -1: all

Rows that decode (the first `num_decodes`) go to the decode wrapper. All others, prompt chunks and
rows with guesses, go to the prefill wrapper with a causal mask, which takes the queries as the
last ones of each sequence. A plan is made once a step for each kind of layer (window, soft cap,
scale), not for each layer.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from engine.attention.base import AttentionBackend, AttentionLayer, StepBatch
from engine.attention.kv_format import KVFormat, LatentFormat
from engine.staging import Staging

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 256 << 20  # of all wrappers together: they run one after the other
_HEAD_DIMS = (64, 128, 256)  # that its kernels are made for
_OLDEST_GPU = (8, 0)  # bfloat16 on tensor cores
# From so many query heads for a KV head on, the decode kernel on tensor cores is the faster one.
_TENSOR_CORE_GROUP = 3

_Kind = tuple[int | None, float | None, float]  # window, soft cap, scale


def load() -> ModuleType | None:
    """The library, if it is installed and can be imported."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            logger.warning("flashinfer is installed but cannot be imported: %s", error)
        return None
    except Exception as error:  # of one of the many things that it imports
        logger.warning("flashinfer is installed but cannot be imported: %s", error)
        return None


def why_not(kv_cache: torch.Tensor, kv_format: KVFormat | LatentFormat) -> str:
    """Why FlashInfer's kernels cannot read this cache; "" if they can."""
    if kv_cache.device.type != "cuda":
        return "the KV cache is not on a GPU"
    if isinstance(kv_format, LatentFormat):
        return "it reads keys and values, and latent attention stores them as one"
    if torch.cuda.get_device_capability(kv_cache.device) < _OLDEST_GPU:
        return "the GPU is older than compute capability 8.0"
    if kv_format.compute_dtype not in (torch.float16, torch.bfloat16):
        return f"it does not compute in {str(kv_format.compute_dtype).removeprefix('torch.')}"
    is_fp8 = kv_format.name == "fp8_e4m3" and kv_cache.shape[-1] % 16 == 0
    if not is_fp8 and kv_cache.dtype != kv_format.compute_dtype:
        return f"it does not read blocks of kv_cache_dtype {kv_format.name} in a model like this"
    head_dim = kv_format.head_dim(kv_cache.shape[-1])
    if head_dim not in _HEAD_DIMS:
        return f"it has no kernels for a head dimension of {head_dim}"
    return ""


@dataclass(slots=True)
class PagedIndex:
    """Some sequences of a batch in the library's words."""

    qo_indptr: list[int] = field(default_factory=lambda: [0])
    kv_indptr: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    last_page_len: list[int] = field(default_factory=list)

    def add(self, query_len: int, seq_len: int, table: list[int], block_size: int) -> None:
        num_blocks = -(-seq_len // block_size)
        self.qo_indptr.append(self.qo_indptr[-1] + query_len)
        self.kv_indptr.append(self.kv_indptr[-1] + num_blocks)
        self.indices += table[:num_blocks]  # a table may have room for more
        self.last_page_len.append(seq_len - (num_blocks - 1) * block_size)


class FlashInferAttention(AttentionBackend):
    """Owns the library's wrappers, their workspace and the index of the step; the cache is the
    engine's.

    A batch `for_graph` is planned into buffers that keep their place for each number of
    sequences: `forward` may be captured once after such a plan and replayed after every later
    one."""

    can_capture = True

    def __init__(
        self,
        kv_cache: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, row]
        num_heads: int,
        layers: Sequence[AttentionLayer],
        library: Any,
        kv_format: KVFormat,
    ) -> None:
        """`library`: the module flashinfer."""
        self._cache, self._library, self._format = kv_cache, library, kv_format
        self._num_heads, self._device = num_heads, kv_cache.device
        _, _, _, self._num_kv_heads, self._block_size, row = kv_cache.shape
        self._head_dim = kv_format.head_dim(row)
        # fp8: the kernels take each row's own scale beside the values.
        self._has_scales = kv_format.name == "fp8_e4m3"
        self._kinds = list(dict.fromkeys(_kind(layer) for layer in layers))
        # The library wants zeros.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._prefills = {
            kind: library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            for kind in self._kinds
        }
        self._eager_decodes = {kind: self._make_decode() for kind in self._kinds}
        self._decodes = self._eager_decodes  # of this step
        self._graph_decodes: dict[int, dict[_Kind, Any]] = {}
        self._graph_indices = torch.empty(0, dtype=torch.int32)
        self._graph_slots = torch.empty(0, dtype=torch.int64)
        self._staging = Staging(self._device, torch.int32)

    def reserve_for_graphs(self, max_sequences: int, max_blocks: int) -> None:
        """Room for batches `for_graph`: `max_blocks` of all their tables together."""
        self._graph_indices = torch.zeros(max_blocks, dtype=torch.int32, device=self._device)
        self._graph_slots = torch.zeros(2, max_sequences, dtype=torch.int64, device=self._device)

    # ------------------------------------------------------------------ plan

    def plan(self, batch: StepBatch) -> None:
        size = self._block_size
        decodes, prefills = PagedIndex(), PagedIndex()
        blocks: list[int] = []  # of each token of the step: where its key and value go
        offsets: list[int] = []
        for i, (query_len, seq_len, table) in enumerate(
            zip(batch.query_lens, batch.seq_lens, batch.block_tables, strict=True)
        ):
            for position in range(seq_len - query_len, seq_len):
                blocks.append(table[position // size])
                offsets.append(position % size)
            part = decodes if i < batch.num_decodes else prefills
            part.add(query_len, seq_len, table, size)
        block_ids, slots, decode_indices, prefill_indices = self._staging.put(
            blocks, offsets, decodes.indices, prefills.indices
        )
        if batch.for_graph:
            place = self._graph_slots[:, : len(blocks)]
            place[0].copy_(block_ids)
            place[1].copy_(slots)
            self._block_ids, self._slots = place[0], place[1]
        else:
            self._block_ids, self._slots = block_ids.long(), slots.long()
        self._num_decodes = batch.num_decodes
        if batch.num_decodes:
            self._plan_decodes(decodes, decode_indices, batch.for_graph)
        if batch.num_decodes < len(batch.query_lens):
            self._plan_prefills(prefills, prefill_indices)

    def _plan_decodes(self, index: PagedIndex, indices: torch.Tensor, for_graph: bool) -> None:
        num_sequences = len(index.last_page_len)
        self._decodes = self._eager_decodes
        if for_graph:
            if num_sequences not in self._graph_decodes:
                made = {kind: self._make_decode(num_sequences) for kind in self._kinds}
                self._graph_decodes[num_sequences] = made
            self._decodes = self._graph_decodes[num_sequences]
        indptr, last = self._host(index.kv_indptr), self._host(index.last_page_len)
        for kind, wrapper in self._decodes.items():
            wrapper.plan(indptr, indices, last, *self._shape(), **self._options(kind))

    def _plan_prefills(self, index: PagedIndex, indices: torch.Tensor) -> None:
        queries, indptr = self._host(index.qo_indptr), self._host(index.kv_indptr)
        last = self._host(index.last_page_len)
        for kind, wrapper in self._prefills.items():
            wrapper.plan(
                queries, indptr, indices, last, *self._shape(), causal=True, **self._options(kind)
            )

    def _make_decode(self, graph_size: int = 0) -> Any:
        group = self._num_heads // self._num_kv_heads
        options: dict[str, Any] = {}
        if graph_size:
            options = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._zeros(graph_size + 1),
                "paged_kv_indices_buffer": self._graph_indices,  # read by one graph at a time
                "paged_kv_last_page_len_buffer": self._zeros(graph_size),
            }
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_tensor_cores=group >= _TENSOR_CORE_GROUP,
            backend="fa2",  # auto may change its mind between two plans, which a graph cannot
            **options,
        )

    def _shape(self) -> tuple[int, int, int, int]:
        return (self._num_heads, self._num_kv_heads, self._head_dim, self._block_size)

    def _options(self, kind: _Kind) -> dict[str, Any]:
        window, softcap, scale = kind
        options = {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": softcap or 0.0,
            "sm_scale": scale,
            "q_data_type": self._format.compute_dtype,
            "kv_data_type": self._cache.dtype,
        }
        if self._has_scales:
            options |= {"kv_data_type": torch.float8_e4m3fn, "use_token_head_sf": True}
        return options

    def _host(self, values: list[int]) -> torch.Tensor:
        """On the host, where plans are made; pinned, since a copy of it goes to the GPU."""
        made = torch.tensor(values, dtype=torch.int32)
        return made.pin_memory() if self._device.type == "cuda" else made

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    # --------------------------------------------------------------- forward

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = self._cache[:, layer.index, 0], self._cache[:, layer.index, 1]
        keys[self._block_ids, :, self._slots] = self._format.encode(key)
        values[self._block_ids, :, self._slots] = self._format.encode(value)
        more: dict[str, Any] = {}
        if self._has_scales:
            keys, key_scales = self._format.split(keys)
            values, value_scales = self._format.split(values)
            more["kv_cache_sf"] = (key_scales.squeeze(-1), value_scales.squeeze(-1))
        cache, kind, split = (keys, values), _kind(layer), self._num_decodes
        if split == query.shape[0]:
            return self._decodes[kind].run(query, cache, **more)
        if split == 0:
            return self._prefills[kind].run(query, cache, **more)
        out = torch.empty(query.shape, dtype=query.dtype, device=self._device)
        self._decodes[kind].run(query[:split], cache, out=out[:split], **more)
        self._prefills[kind].run(query[split:], cache, out=out[split:], **more)
        return out


def _kind(layer: AttentionLayer) -> _Kind:
    return (layer.sliding_window, layer.logit_softcap, layer.scale)
