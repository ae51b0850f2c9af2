"""What llama.cpp's `deepseek2` files say in other words than the checkpoints they were made of.

Both V2 and V3 are `deepseek2`; their gating tells them apart. `kv_b_proj` comes whole, or split
into the two matrices that absorbed attention multiplies with, keys transposed.
"""

from collections.abc import Mapping
from typing import Any

import torch

from core.errors import ModelError

LAYER_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_KEYS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_SOFTMAX, _SIGMOID = 1, 2  # gguf.ExpertGatingFuncType
# Experts -> groups and active ones, of DeepSeek-V2 and V3: early files leave them out.
_GROUPS = {160: (8, 3), 256: (8, 4)}


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys of Hugging Face from a file's metadata."""
    config = {hf: values[key] for key, hf in _KEYS.items() if key in values}
    rope = _number(values, "rope.dimension_count")
    # With the split kv_b_proj, key and value length are those of the cached row.
    is_split = "attention.key_length_mla" in values
    suffix = "_mla" if is_split else ""
    config["qk_rope_head_dim"] = rope
    config["qk_nope_head_dim"] = _number(values, f"attention.key_length{suffix}") - rope
    config["v_head_dim"] = _number(values, f"attention.value_length{suffix}")
    config["q_lora_rank"] = values.get("attention.q_lora_rank")
    gating = values.get("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"GGUF metadata: expert_gating_func {gating!r} is not known")
    config["model_type"] = "deepseek_v2" if gating == _SOFTMAX else "deepseek_v3"
    if "n_group" not in config and values.get("expert_count") in _GROUPS:
        config["n_group"], config["topk_group"] = _GROUPS[values["expert_count"]]
    if gating == _SOFTMAX and config.get("n_group", 1) > 1:
        config["topk_method"] = "group_limited_greedy"
    return config


def scaling_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Beside the other settings of yarn. Only one factor is stored: in every published model it
    is both, so that nothing is left of them on cos and sin."""
    multiplier = values.get("rope.scaling.yarn_log_multiplier")
    if not multiplier:
        return {}
    return {"mscale": multiplier / 0.1, "mscale_all_dim": multiplier / 0.1}


def merged_kv_b(k_b: torch.Tensor, v_b: torch.Tensor) -> torch.Tensor:
    """`[heads, rank, nope]` and `[heads, v, rank]` -> `kv_b_proj`, `[heads * (nope + v), rank]`."""
    return torch.cat((k_b.transpose(1, 2), v_b), dim=1).flatten(0, 1)


def _number(values: Mapping[str, Any], key: str) -> int:
    if not isinstance(values.get(key), int):
        raise ModelError(f"GGUF metadata: {key} is missing or no number")
    return int(values[key])
