"""What the decoder needs to know about a model, read from a Hugging Face config.

Everything that this code does not know is refused by name: a model that loads computes what its
authors meant.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from core.errors import ModelError
from engine.model.families import FAMILIES, Family

Scoring = Literal["softmax", "sigmoid"]

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
    is_interleaved: bool = False  # pairs are neighbours, not half a head apart


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads
    are read out of one latent a token."""

    q_lora_rank: int | None  # None: queries come straight from the hidden state
    kv_lora_rank: int
    nope_head_dim: int  # of a query head: its part without rope
    rope_head_dim: int  # and its part with; one key of this size is shared by all heads
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    scoring: Scoring = "softmax"
    # Experts in equal groups; a token's experts come from its `num_active_groups` best ones.
    num_groups: int = 1
    num_active_groups: int = 1
    has_correction_bias: bool = False  # added to scores for the choice, not for the weights
    scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # of an expert that every token goes through


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
    head_dim: int  # of a cached row; with latent attention the latent and the shared key
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
    latent: LatentConfig | None
    moe: MoeConfig | None
    layers: tuple[LayerConfig, ...]
    # Layers behind the last one that a checkpoint may have for guessing tokens; not loaded.
    num_mtp_layers: int

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
        raise ModelError(
            f"checkpoint is quantized by {method!r}; use plain weights, fp8 in blocks, or GGUF"
        )
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: only causal attention is served")
    values = _Values(raw, family, model_type)

    num_heads = values.need("num_attention_heads")
    latent = _latent(values) if family.latent_attention else None
    num_kv_heads = values.get("num_key_value_heads", num_heads) if latent is None else 1
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads")
    if latent is None:
        head_dim = values.get("head_dim") or values.need("hidden_size") // num_heads
    else:
        head_dim = latent.kv_lora_rank + latent.rope_head_dim
    activation = values.get("hidden_activation") or values.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"unknown activation {activation!r}")
    attention_bias = bool(values.get("attention_bias", False))
    rotated_dim = head_dim if latent is None else latent.rope_head_dim
    rope, local_rope = _ropes(raw, values, family, rotated_dim)
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
        attention_scale=_attention_scale(values, head_dim, latent, rope),
        attention_softcap=values.get("attn_logit_softcapping"),
        final_softcap=values.get("final_logit_softcapping"),
        rope=rope,
        local_rope=local_rope,
        latent=latent,
        moe=_moe(values, family),
        layers=_layers(values, family),
        num_mtp_layers=values.get("num_nextn_predict_layers", 0),
    )


def _latent(values: _Values) -> LatentConfig:
    return LatentConfig(
        q_lora_rank=values.get("q_lora_rank"),
        kv_lora_rank=values.need("kv_lora_rank"),
        nope_head_dim=values.need("qk_nope_head_dim"),
        rope_head_dim=values.need("qk_rope_head_dim"),
        v_head_dim=values.need("v_head_dim"),
    )


def _attention_scale(
    values: _Values, head_dim: int, latent: LatentConfig | None, rope: RopeConfig
) -> float:
    if latent is None:
        return 1 / math.sqrt(values.get("query_pre_attn_scalar") or head_dim)
    scale = 1 / math.sqrt(latent.nope_head_dim + latent.rope_head_dim)
    all_dim = rope.settings.get("mscale_all_dim")
    if rope.rope_type == "yarn" and all_dim:
        # The part of a head without rope is stretched too, so it is the scores that are.
        scale *= yarn_mscale(rope.settings.get("factor", 1.0), all_dim) ** 2
    return scale


def yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _moe(values: _Values, family: Family) -> MoeConfig | None:
    if family.experts is None:
        return None
    num_experts = values.get("num_experts") or values.get("n_routed_experts")
    size = values.get("moe_intermediate_size") or values.need("intermediate_size")
    moe = MoeConfig(
        num_experts=num_experts or values.need("num_local_experts"),
        num_experts_per_tok=values.need("num_experts_per_tok"),
        intermediate_size=size,
        norm_topk_prob=bool(values.need("norm_topk_prob")),
    )
    return moe if not family.grouped_experts else _grouped(values, moe)


# How DeepSeek's configs call a way to choose experts -> how their scores are made.
_TOPK_METHODS: Mapping[str, Scoring] = {
    "greedy": "softmax",
    "group_limited_greedy": "softmax",
    "noaux_tc": "sigmoid",
}


def _grouped(values: _Values, moe: MoeConfig) -> MoeConfig:
    method, scoring = values.need("topk_method"), values.need("scoring_func")
    if method not in _TOPK_METHODS:
        known = ", ".join(_TOPK_METHODS)
        raise ModelError(f"unknown topk_method {method!r}; known are {known}")
    if scoring != _TOPK_METHODS[method]:
        raise ModelError(f"topk_method {method!r} with scoring_func {scoring!r} is not known")
    if scoring == "softmax" and moe.norm_topk_prob:
        # Some multiply these by routed_scaling_factor and some do not; nobody has published one.
        raise ModelError(f"norm_topk_prob with topk_method {method!r} is not known")
    groups, active = 1, 1
    if method != "greedy":
        groups, active = values.need("n_group"), values.need("topk_group")
    of_groups = moe.num_experts // groups * active
    if moe.num_experts % groups or active > groups or of_groups < moe.num_experts_per_tok:
        raise ModelError(
            f"{moe.num_experts_per_tok} of {moe.num_experts} experts cannot come from {active} "
            f"of {groups} groups"
        )
    return replace(
        moe,
        scoring=scoring,
        num_groups=groups,
        num_active_groups=active,
        has_correction_bias=method == "noaux_tc",
        scaling_factor=float(values.need("routed_scaling_factor")),
        shared_intermediate_size=moe.intermediate_size * (values.get("n_shared_experts") or 0),
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
    dense |= set(range(values.get("first_k_dense_replace", 0)))
    step = values.get("decoder_sparse_step", 1)
    every = values.get("moe_layer_freq", 1)
    layers = []
    for i, layer_type in enumerate(types):
        sliding = family.windows == "all" or (
            family.windows == "layer_types" and layer_type == "sliding_attention"
        )
        layers.append(
            LayerConfig(
                sliding_window=window if sliding else None,
                has_local_rope=family.local_rope and sliding,
                has_experts=family.experts is not None
                and i not in dense
                and (i + 1) % step == 0
                and i % every == 0,
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
        is_interleaved=family.latent_attention and bool(values.get("rope_interleave", True)),
    )


def _context(values: _Values, rope: RopeConfig) -> int:
    """Tokens that the model was made for. A yarn config may state the length before scaling."""
    length = int(values.need("max_position_embeddings"))
    original = rope.settings.get("original_max_position_embeddings")
    if rope.rope_type == "yarn" and original is not None:
        length = max(length, int(original * rope.settings.get("factor", 1)))
    return length
