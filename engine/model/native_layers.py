"""All layers of a decoder for the tokens of one step in one native call (`layers.cpp`)."""

import ctypes
from contextlib import nullcontext

import numpy as np
import torch

from engine import native
from engine.attention.base import StepBatch
from engine.model.attention import MultiHeadAttention
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Mlp, Norm, Weights, native_weight
from engine.model.rope import Rope
from engine.prompt_sign import host_sign
from engine.types import Maxima

_pointer, _long = ctypes.c_void_p, ctypes.c_long
# Tokens of one sequence from which on packing its keys pays.
_CHUNK_ROWS = 8
_NO_CHUNKS = np.empty((0, 4), dtype=np.int64)


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _pointer),
        ("qkv", native.Weight),
        ("q_norm", _pointer),
        ("k_norm", _pointer),
        ("o", native.Weight),
        ("mlp_norm", _pointer),
        ("gate_up", native.Weight),
        ("down", native.Weight),
        ("window", _long),
        ("rope", _long),
    ]


class _Rope(ctypes.Structure):
    _fields_ = [("frequencies", _pointer), ("factor", ctypes.c_float)]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("embedding", _pointer),
        ("ropes", _Rope * 2),
        ("num_ropes", _long),
        ("layers", _pointer),
        *[(name, _long) for name in (
            "num_layers", "hidden", "intermediate", "heads", "kv_heads", "dim", "rotary_dim",
        )],
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("norm", _pointer),
        ("head", native.Weight),
        ("cache", _pointer),
        ("block_size", _long),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        ("rows", _long),
        ("ids", _pointer),
        ("positions", _pointer),
        ("sequences", _pointer),
        ("tables", _pointer),
        ("table_stride", _long),
        ("chunks", _pointer),
        ("num_chunks", _long),
        ("singles", _pointer),
        ("num_singles", _long),
        ("logits_rows", _pointer),
        ("num_logits", _long),
        ("logits", _pointer),
        ("best", _pointer),
        ("places", _pointer),
        *[(name, _pointer) for name in (
            "residual", "last_residual", "turns", "normed", "qkv", "attended", "activated",
        )],
    ]  # fmt: skip


class NativeLayers:
    """Runs steps over one model and one cache, which it keeps alive. One thread at a time: the
    scratch is reused, and grows to the largest step so far. Idle threads may still read weights and
    scratch when a step has ended."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ropes: list[Rope], kv_cache: torch.Tensor
    ) -> None:
        """Only after `serves`. One or two ropes, the second for layers with a local one."""
        self._await_hands = native.await_hands()
        self._alive = (weights, ropes, kv_cache)
        self._num_ropes = len(ropes)
        self._config = config
        self._layers = (_Layer * config.num_layers)(
            *[_layer(config, i, layer) for i, layer in enumerate(weights.layers)]
        )
        head = native_weight(weights.head)
        assert head is not None
        self._decoder = _Decoder(
            weights.embedding.data_ptr(),
            (_Rope * 2)(*[_Rope(rope.frequencies.data_ptr(), rope.factor) for rope in ropes]),
            len(ropes),
            ctypes.addressof(self._layers),
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rope.rotary_dim,
            config.norm_eps,
            config.attention_scale,
            weights.norm.weight.data_ptr(),
            head,
            kv_cache.data_ptr(),
            kv_cache.shape[4],
        )
        self._vocab_size = head.outputs
        # Quantised weights are multiplied in another way up to MAX_ROWS; idle threads or not, no
        # bit may differ.
        is_plain = self._layers[0].qkv.kind == native.KINDS["plain"]
        self._few_rows = native.FEW_ROWS if is_plain else native.MAX_ROWS
        self.maxima: Maxima | None = None  # of the logits of the last step
        self._scratch: dict[str, torch.Tensor] = {}
        self._num_rows = 0  # that the scratch has room for

    def __del__(self) -> None:
        self._await_hands()  # by itself: modules may be gone by now

    def forward(
        self,
        input_ids: torch.Tensor,  # int64 [T]
        positions: torch.Tensor,  # int64 [T]
        batch: StepBatch,
        logits_rows: torch.Tensor,  # int64 [R]
    ) -> torch.Tensor:
        """Writes the KV of all T tokens; float32 logits `[R, vocab]`."""
        loaded = native.library()
        assert loaded is not None
        threads = torch.get_num_threads()
        rows, num_logits = len(input_ids), len(logits_rows)
        self._make_room(max(rows, num_logits, threads * native.MAX_ROWS))
        laid_out = _LaidOut(batch)
        # By numpy, as all here: torch's operations let other threads take the interpreter's lock,
        # and this one would wait for it before the native call, which needs no lock.
        logits = np.empty((num_logits, self._vocab_size), dtype=np.float32)
        best, places = np.empty(num_logits, np.float32), np.empty(num_logits, np.int64)
        step = _Step(
            rows=rows,
            ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            sequences=laid_out.sequences.ctypes.data,
            tables=laid_out.tables.ctypes.data,
            table_stride=laid_out.tables.shape[1],
            chunks=laid_out.chunks.ctypes.data,
            num_chunks=len(laid_out.chunks),
            singles=laid_out.singles.ctypes.data,
            num_singles=len(laid_out.singles),
            logits_rows=logits_rows.data_ptr(),
            num_logits=num_logits,
            logits=logits.ctypes.data,
            best=best.ctypes.data,
            places=places.ctypes.data,
            **{name: buffer.data_ptr() for name, buffer in self._scratch.items()},
        )
        idle_threads, reads_prompt = native.idle_threads(), len(laid_out.chunks) > 0
        few_rows = self._few_rows if idle_threads and reads_prompt else native.MAX_ROWS
        hands = idle_threads if rows > few_rows else 0
        with host_sign().raised() if hands and reads_prompt else nullcontext():
            loaded.pdserve_layers(
                ctypes.addressof(self._decoder), ctypes.addressof(step), threads, hands, few_rows
            )
        self.maxima = Maxima(torch.from_numpy(best), torch.from_numpy(places))
        return torch.from_numpy(logits)

    def _make_room(self, rows: int) -> None:
        if rows <= self._num_rows:
            return
        self._await_hands()
        config, half = self._config, torch.bfloat16
        heads, dim = config.num_heads, config.head_dim
        self._scratch = {
            "residual": torch.empty(rows, config.hidden_size),
            "last_residual": torch.empty(rows, config.hidden_size),
            "turns": torch.empty(self._num_ropes, rows, 2, config.rope.rotary_dim, dtype=half),
            "normed": torch.empty(rows, config.hidden_size, dtype=half),
            "qkv": torch.empty(rows, (heads + 2 * config.num_kv_heads) * dim, dtype=half),
            "attended": torch.empty(rows, heads * dim, dtype=half),
            "activated": torch.empty(rows, config.intermediate_size, dtype=half),
        }
        self._num_rows = rows


class _LaidOut:
    """A batch as the native code reads it: block tables by sequence, padded with 0; of each row
    its sequence; and which rows go through attention together."""

    def __init__(self, batch: StepBatch) -> None:
        longest = max(map(len, batch.block_tables))
        padded = [table + [0] * (longest - len(table)) for table in batch.block_tables]
        self.tables = np.array(padded, dtype=np.int64)
        lens = np.array(batch.query_lens, dtype=np.int64)
        if len(lens) == batch.num_decodes:
            self.sequences = self.singles = np.arange(len(lens))
            self.chunks = _NO_CHUNKS
            return
        self.sequences = np.repeat(np.arange(len(lens)), lens)
        is_single = lens[self.sequences] < _CHUNK_ROWS
        self.singles = np.flatnonzero(is_single)
        (long,) = np.nonzero(lens >= _CHUNK_ROWS)
        starts, prefixes = np.cumsum(lens) - lens, np.array(batch.seq_lens) - lens
        # Rows of `PromptChunk`: first row, tokens, prefix, sequence.
        self.chunks = np.stack((starts[long], lens[long], prefixes[long], long), axis=1)


def serves(config: ModelConfig, weights: Weights, kv_cache: torch.Tensor) -> bool:
    """Whether this model, with this cache `[blocks, layers, 2, kv_heads, block_size, dim]`, is one
    that the native code knows."""
    if native.library() is None or kv_cache.device.type != "cpu":
        return False
    if kv_cache.dtype != torch.bfloat16 or kv_cache.shape[-1] != config.head_dim:
        return False
    is_plain = (
        config.activation == "silu"
        and config.attention_softcap is None
        and config.final_softcap is None
        and config.moe is None
        and not config.family.scaled_embeddings
        and weights.embedding.dtype == torch.bfloat16
    )
    fits = (
        config.head_dim in native.DIMS
        and config.rope.rotary_dim % 32 == 0
        and (config.local_rope is None or config.local_rope.rotary_dim == config.rope.rotary_dim)
        and config.hidden_size % native.TILE == 0
        and config.intermediate_size % native.TILE == 0
    )
    return (
        is_plain
        and fits
        and all(map(_is_native, [*weights.layers]))
        and (_norm_is_native(weights.norm) and native_weight(weights.head) is not None)
    )


def _is_native(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, MultiHeadAttention) or not isinstance(mlp, Mlp):
        return False
    if layer.attention_post_norm or layer.mlp_post_norm:
        return False
    norms = (layer.input_norm, layer.mlp_norm, attention.q_norm, attention.k_norm)
    products = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    return all(map(_norm_is_native, norms)) and all(map(native_weight, products))


def _norm_is_native(norm: Norm | None) -> bool:
    return norm is None or norm.weight.dtype == torch.bfloat16


def _layer(config: ModelConfig, index: int, layer: Layer) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, MultiHeadAttention) and isinstance(mlp, Mlp)
    products = [native_weight(p) for p in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    qkv, o, gate_up, down = products
    return _Layer(
        _address(layer.input_norm),
        qkv,
        _address(attention.q_norm),
        _address(attention.k_norm),
        o,
        _address(layer.mlp_norm),
        gate_up,
        down,
        config.layers[index].sliding_window or 0,
        int(config.layers[index].has_local_rope),
    )


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
