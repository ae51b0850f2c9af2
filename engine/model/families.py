"""The model families that the one decoder serves, as a table of flags.

A family is everything about an architecture that its config.json does not say. Keys are Hugging
Face `model_type`s; `defaults` are config values that published checkpoints leave out, as the
family's config class in transformers has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a mixture-of-experts block's tensors are, relative to the layer."""

    router: str
    experts: str  # prefix of "{expert}.{gate|up|down}.weight"
    gate: str
    up: str
    down: str
    shared: str | None = None  # prefix of the expert that every token goes through


@dataclass(frozen=True, slots=True)
class Family:
    # Biases of q, k and v; None: of q, k, v and o as the config's `attention_bias` says.
    qkv_bias: bool | None = None
    qk_norm: bool = False  # RMS norm of every query and key head before rope
    # Which layers have the sliding window: all, those that `layer_types` names, or none.
    windows: Literal["none", "all", "layer_types"] = "none"
    # Without `layer_types`, layer i has full attention if (i + 1) % full_attention_every == 0;
    # 0: layers below `max_window_layers` have.
    full_attention_every: int = 0
    local_rope: bool = False  # window layers rotate with a theta of their own
    fused_projections: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    norm_offset: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # norms after attention and MLP too
    scaled_embeddings: bool = False  # embeddings times sqrt(hidden_size)
    experts: ExpertNames | None = None
    # DeepSeek's: experts chosen by groups, routed in float32, one shared by all tokens.
    grouped_experts: bool = False
    latent_attention: bool = False  # keys and values of all heads in one latent a token
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEEPSEEK_EXPERTS = ExpertNames(
    "mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.shared_experts"
)
_DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "v_head_dim": 128,
}
_QWEN_DEFAULTS = {"rms_norm_eps": 1e-6, "max_window_layers": 28, "sliding_window": 4096}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={"rms_norm_eps": 1e-6}),  # Llama 2 and 3.x, SmolLM2
    "mistral": Family(windows="all", defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, windows="layer_types", defaults=_QWEN_DEFAULTS),
    "qwen3": Family(
        qk_norm=True, windows="layer_types", defaults={**_QWEN_DEFAULTS, "head_dim": 128}
    ),
    "phi3": Family(
        qkv_bias=False,
        windows="all",
        fused_projections=True,
        # Early checkpoints call longrope by other names.
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "gemma2": Family(
        windows="layer_types",
        full_attention_every=2,
        norm_offset=True,
        post_norms=True,
        scaled_embeddings=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        qk_norm=True,
        windows="layer_types",
        full_attention_every=6,
        local_rope=True,
        norm_offset=True,
        post_norms=True,
        scaled_embeddings=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
    ),
    "mixtral": Family(
        qkv_bias=False,
        windows="all",
        experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        defaults={
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
    ),
    "qwen3_moe": Family(
        qk_norm=True,
        windows="all",
        experts=ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
        defaults={**_QWEN_DEFAULTS, "norm_topk_prob": False, "num_experts_per_tok": 8},
    ),
    "deepseek_v2": Family(
        latent_attention=True,
        grouped_experts=True,
        experts=_DEEPSEEK_EXPERTS,
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_method": "greedy",
        },
    ),
    "deepseek_v3": Family(
        latent_attention=True,
        grouped_experts=True,
        experts=_DEEPSEEK_EXPERTS,
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
        },
    ),
}
