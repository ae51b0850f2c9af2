"""All layers of a decoder for a few tokens in one native call (`few_rows.cpp`)."""

import ctypes

import torch

from engine import native
from engine.attention.base import StepBatch
from engine.model.attention import MultiHeadAttention
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Mlp, Norm, Weights, native_weight

_pointer, _long = ctypes.c_void_p, ctypes.c_long


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


class _Decoder(ctypes.Structure):
    _fields_ = [
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
        ("embedded", _pointer),
        ("cos", _pointer * 2),
        ("sin", _pointer * 2),
        ("tables", _pointer),
        ("table_stride", _long),
        ("lens", _pointer),
        ("logits_rows", _pointer),
        ("num_logits", _long),
        ("logits", _pointer),
        *[(name, _pointer) for name in ("residual", "normed", "qkv", "attended", "activated")],
    ]


class FewRows:
    """Runs steps of up to `native.MAX_ROWS` tokens over one model and one cache, which it keeps
    alive. One thread at a time: the scratch is reused."""

    def __init__(self, config: ModelConfig, weights: Weights, kv_cache: torch.Tensor) -> None:
        """Only after `serves`."""
        self._alive = (weights, kv_cache)
        self._config = config
        self._layers = (_Layer * config.num_layers)(
            *[_layer(config, i, layer) for i, layer in enumerate(weights.layers)]
        )
        head = native_weight(weights.head)
        assert head is not None
        self._decoder = _Decoder(
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
        rows, dim = native.MAX_ROWS, config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        half = torch.bfloat16
        self._residual = torch.empty(rows, config.hidden_size)
        self._scratch = {
            "qkv": torch.empty(rows, heads * dim, dtype=half),
            "attended": torch.empty(rows, config.num_heads * dim, dtype=half),
            "activated": torch.empty(rows, config.intermediate_size, dtype=half),
        }
        self._normed = torch.empty(0, dtype=half)

    def forward(
        self,
        embedded: torch.Tensor,  # bfloat16 [T, hidden]
        cos_sins: list[tuple[torch.Tensor, torch.Tensor]],  # one for each kind of rope
        batch: StepBatch,
        logits_rows: torch.Tensor,  # int64 [R]
    ) -> torch.Tensor:
        """Writes the KV of all T tokens; float32 logits `[R, vocab]`."""
        loaded = native.library()
        assert loaded is not None
        threads = torch.get_num_threads()
        rows = embedded.shape[0]
        normed = threads * native.MAX_ROWS * self._config.hidden_size
        if self._normed.numel() < normed:
            self._normed = self._normed.new_empty(normed)
        tables, lens = _by_row(batch)
        logits = self._residual.new_empty(len(logits_rows), self._vocab_size)
        step = _Step(
            rows=rows,
            embedded=embedded.data_ptr(),
            tables=tables.data_ptr(),
            table_stride=tables.shape[1],
            lens=lens.data_ptr(),
            logits_rows=logits_rows.data_ptr(),
            num_logits=len(logits_rows),
            logits=logits.data_ptr(),
            residual=self._residual.data_ptr(),
            normed=self._normed.data_ptr(),
            **{name: buffer.data_ptr() for name, buffer in self._scratch.items()},
        )
        for i, (cos, sin) in enumerate(cos_sins):
            step.cos[i], step.sin[i] = cos.data_ptr(), sin.data_ptr()
        loaded.pdserve_few_rows(ctypes.addressof(self._decoder), ctypes.addressof(step), threads)
        return logits


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


def _by_row(batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table, padded with 0, and length of what each token sees: int64 `[T, blocks]`,
    `[T]`."""
    longest = max(map(len, batch.block_tables))
    tables: list[list[int]] = []
    lens: list[int] = []
    for query_len, seq_len, table in zip(
        batch.query_lens, batch.seq_lens, batch.block_tables, strict=True
    ):
        tables += [table + [0] * (longest - len(table))] * query_len
        lens += range(seq_len - query_len + 1, seq_len + 1)
    return torch.tensor(tables), torch.tensor(lens)
