"""What the decoder needs to know about a model, read from a Hugging Face config.

Everything that this code does not know is refused by name: a model that loads computes what its
authors meant.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import ModelError
from engine.model.families import FAMILIES, Family

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Wrappers whose text model is one of the families.
_TEXT_OF = {"gemma3": "gemma3_text"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding. `settings` are the scaling's own keys, as Hugging Face names them."""

    rope_type: str
    theta: float
    rotary_dim: int  # the first so many dimensions of a head are rotated
    max_position_embeddings: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool


@dataclass(frozen=True, slots=True)
class LayerConfig:
    sliding_window: int | None
    has_local_rope: bool
    has_experts: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and flags of one model; `layers[i]` is what differs between layers."""

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_model_len: int
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    rope: RopeConfig
    local_rope: RopeConfig | None
    moe: MoeConfig | None
    layers: tuple[LayerConfig, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


class _Values:
    """Config values with the family's defaults behind them."""

    def __init__(self, values: Mapping[str, Any], family: Family, model_type: str) -> None:
        self._values = {**family.defaults, **values}
        self._model_type = model_type

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self._values.get(key)
        if value is None:
            raise ModelError(f"config of {self._model_type}: {key} is missing")
        return value


def parse_config(raw: Mapping[str, Any], max_model_len: int | None = None) -> ModelConfig:
    """Reads a config.json. `max_model_len` shortens the context. Raises ModelError."""
    model_type = str(raw.get("model_type"))
    if model_type in _TEXT_OF:
        raw = {
            "tie_word_embeddings": raw.get("tie_word_embeddings"),
            **(raw.get("text_config") or {}),
        }
        model_type = _TEXT_OF[model_type]
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted([*FAMILIES, *_TEXT_OF]))
        raise ModelError(f"unknown architecture {model_type!r}; known are {known}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"checkpoint is quantized by {method!r}; use plain weights or GGUF")
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: only causal attention is served")
    values = _Values(raw, family, model_type)

    num_heads = values.need("num_attention_heads")
    num_kv_heads = values.get("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads")
    head_dim = values.get("head_dim") or values.need("hidden_size") // num_heads
    activation = values.get("hidden_activation") or values.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"unknown activation {activation!r}")
    attention_bias = bool(values.get("attention_bias", False))
    rope, local_rope = _ropes(raw, values, family, head_dim)
    scale = values.get("query_pre_attn_scalar") or head_dim
    return ModelConfig(
        model_type=model_type,
        family=family,
        vocab_size=values.need("vocab_size"),
        hidden_size=values.need("hidden_size"),
        intermediate_size=values.need("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=values.need("rms_norm_eps"),
        max_model_len=min(_context(values, rope), max_model_len or 2**31),
        activation=ACTIVATIONS[activation],
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(values.get("mlp_bias", False)),
        attention_scale=1 / math.sqrt(scale),
        attention_softcap=values.get("attn_logit_softcapping"),
        final_softcap=values.get("final_logit_softcapping"),
        rope=rope,
        local_rope=local_rope,
        moe=_moe(values, family),
        layers=_layers(values, family),
    )


def _moe(values: _Values, family: Family) -> MoeConfig | None:
    if family.experts is None:
        return None
    return MoeConfig(
        num_experts=values.get("num_experts") or values.need("num_local_experts"),
        num_experts_per_tok=values.need("num_experts_per_tok"),
        intermediate_size=values.get("moe_intermediate_size") or values.need("intermediate_size"),
        norm_topk_prob=bool(values.need("norm_topk_prob")),
    )


def _layers(values: _Values, family: Family) -> tuple[LayerConfig, ...]:
    num_layers = values.need("num_hidden_layers")
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    # Qwen's window is off unless the config turns it on.
    if "max_window_layers" in family.defaults and not values.get("use_sliding_window", False):
        window = None
    types = values.get("layer_types") or _default_layer_types(values, family, num_layers)
    for layer_type in types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise ModelError(f"unknown layer type {layer_type!r}")
    if len(types) != num_layers:
        raise ModelError(f"layer_types has {len(types)} entries for {num_layers} layers")
    dense = set(values.get("mlp_only_layers", ()))
    step = values.get("decoder_sparse_step", 1)
    layers = []
    for i, layer_type in enumerate(types):
        sliding = family.windows == "all" or (
            family.windows == "layer_types" and layer_type == "sliding_attention"
        )
        layers.append(
            LayerConfig(
                sliding_window=window if sliding else None,
                has_local_rope=family.local_rope and sliding,
                has_experts=family.experts is not None and i not in dense and (i + 1) % step == 0,
            )
        )
    return tuple(layers)


def _default_layer_types(values: _Values, family: Family, num_layers: int) -> list[str]:
    every = values.get("sliding_window_pattern", 0) or family.full_attention_every
    if family.windows != "layer_types":
        return ["full_attention"] * num_layers
    if every:
        is_full = [(i + 1) % every == 0 for i in range(num_layers)]
    else:
        is_full = [i < values.need("max_window_layers") for i in range(num_layers)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def _ropes(
    raw: Mapping[str, Any], values: _Values, family: Family, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    parameters = raw.get("rope_parameters")
    local: Mapping[str, Any] = {}
    if parameters is None:
        parameters = {**(raw.get("rope_scaling") or {})}
        parameters.setdefault("rope_theta", values.get("rope_theta", 10_000.0))
        local = {"rope_theta": values.get("rope_local_base_freq", 10_000.0)}
    elif "full_attention" in parameters or "sliding_attention" in parameters:
        local = parameters.get("sliding_attention") or {}
        parameters = parameters.get("full_attention") or {}
    # Also under a rope_scaling of old, Gemma 3's window layers are never scaled.
    rope = _rope(parameters, values, family, head_dim, values.get("rope_theta", 10_000.0))
    if not family.local_rope:
        return rope, None
    default_theta = values.get("rope_local_base_freq", 10_000.0)
    return rope, _rope(local, values, family, head_dim, default_theta)


def _rope(
    parameters: Mapping[str, Any],
    values: _Values,
    family: Family,
    head_dim: int,
    default_theta: float,
) -> RopeConfig:
    settings = dict(parameters)
    # "type" is the older name of "rope_type"; a config may have both.
    old_type = settings.pop("type", None)
    rope_type = settings.pop("rope_type", None) or old_type or "default"
    rope_type = family.rope_aliases.get(rope_type, rope_type)
    theta = settings.pop("rope_theta", None) or default_theta
    partial = settings.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor", 1)
    original = values.get("original_max_position_embeddings")
    if settings.get("original_max_position_embeddings") is None and original is not None:
        settings["original_max_position_embeddings"] = original
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        rotary_dim=int(head_dim * partial),
        max_position_embeddings=values.need("max_position_embeddings"),
        settings={key: value for key, value in settings.items() if value is not None},
    )


def _context(values: _Values, rope: RopeConfig) -> int:
    """Tokens that the model was made for. A yarn config may state the length before scaling."""
    length = int(values.need("max_position_embeddings"))
    original = rope.settings.get("original_max_position_embeddings")
    if rope.rope_type == "yarn" and original is not None:
        length = max(length, int(original * rope.settings.get("factor", 1)))
    return length
