"""Tiny models with random weights, made by transformers in the test, and a hand-driven engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.model_files import ModelFiles
from engine.attention.base import StepBatch
from engine.model.decoder import Decoder

VOCAB = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 16,
}
# As published: the config has both factors, and they cancel on cos and sin.
_DEEPSEEK_YARN = {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}
# Every family with each of its flags at least once.
FAMILY_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-biases": (
        transformers.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (transformers.LlamaConfig, {"rope_parameters": LINEAR_ROPE}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 8}),
    "mistral-full": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-yarn": (transformers.Qwen2Config, {"rope_parameters": YARN_ROPE}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {**LINEAR_ROPE, "rope_theta": 20000.0},
            },
        },
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 8}),
    "phi3-partial": (
        transformers.Phi3Config,
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        transformers.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi4-mini": (
        transformers.Phi3Config,
        {
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.75,
                **{f"{n}_factor": LONGROPE[f"{n}_factor"][:6] for n in ("short", "long")},
            },
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
    "deepseek-v2-lite": (transformers.DeepseekV2Config, {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek-v2": (
        transformers.DeepseekV2Config,
        {
            **_DEEPSEEK,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        {
            **_DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0},
        },
    ),
    "deepseek-v3-halves": (
        transformers.DeepseekV3Config,
        {
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
}


def make_tiny(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32. Every weight is random: norms and biases too."""
    config_class, settings = FAMILY_CONFIGS[name]
    config = config_class(**{**_COMMON, **settings, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in parameter_name
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.15 * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.float().eval()


def save_tiny(model: Any, folder: Path, **how: Any) -> ModelFiles:
    model.save_pretrained(folder, **how)
    return ModelFiles("tiny", folder, "safetensors")


def edit_config(files: ModelFiles, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = files.path / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def random_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


class PagedRunner:
    """Feeds sequences into a decoder by hand. Blocks come in a scattered order, and each holds
    junk before it is first used."""

    def __init__(self, model: Decoder, num_blocks: int = 96, block_size: int = 4) -> None:
        self.model = model
        self.block_size = block_size
        shape = (num_blocks, *model.kv_block_shape(block_size))
        generator = torch.Generator().manual_seed(1)
        if model.kv_dtype == torch.uint8:  # quantised rows: bytes that make finite scales
            self.kv_cache = torch.randint(1, 90, shape, generator=generator, dtype=torch.uint8)
        else:
            self.kv_cache = torch.randn(shape, generator=generator).to(model.kv_dtype)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        self.block_tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        model.bind(self.kv_cache)

    def step(self, work: dict[str, Sequence[int]]) -> torch.Tensor:
        """Appends tokens to each named sequence; sequences with one token come first. Logits
        `[T, vocab]` of all tokens."""
        names = list(work)
        query_lens = [len(work[name]) for name in names]
        for name, query_len in zip(names, query_lens, strict=True):
            self.reserve(name, query_len)
        seq_lens = [self.lengths[name] for name in names]
        num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(names))
        batch = StepBatch(
            query_lens, seq_lens, [self.block_tables[name] for name in names], num_decodes
        )
        ids = [token for name in names for token in work[name]]
        positions = [p for n, s in zip(query_lens, seq_lens, strict=True) for p in range(s - n, s)]
        return self.model.forward(
            torch.tensor(ids), torch.tensor(positions), batch, torch.arange(len(ids))
        )

    def reserve(self, name: str, num_tokens: int) -> None:
        """Blocks for so many more tokens of a sequence, whose KV comes from somewhere."""
        self.lengths[name] = self.lengths.get(name, 0) + num_tokens
        table = self.block_tables.setdefault(name, [])
        while len(table) * self.block_size < self.lengths[name]:
            table.append(self._free.pop())

    def chunks(self, token_ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Logits of a new sequence that is fed in chunks of `sizes`, the rest one by one."""
        name = f"seq{len(self.block_tables)}"
        sizes = [*sizes, *[1] * (len(token_ids) - sum(sizes))]
        pieces = torch.tensor(list(token_ids)).split(sizes)
        return torch.cat([self.step({name: piece.tolist()}) for piece in pieces])


# ---------------------------------------------------------------- GGUF

_GGUF_ARCHS = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}


def write_gguf(model: Any, path: Path, kind: str = "F32") -> ModelFiles:
    """Writes a model as llama.cpp's converter does. Matrices are stored as `kind`, and the
    model's own weights become what that rounds them to, so that it stays the reference."""
    config = model.config
    arch = _GGUF_ARCHS[config.model_type]
    qtype = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    arch_id = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *buffers]:
        values = parameter.detach().numpy()
        if values.ndim > 1:
            data = gguf.quantize(values, qtype)
            parameter.data = torch.from_numpy(gguf.dequantize(data, qtype).reshape(values.shape))
        for gguf_name, part in _gguf_parts(name, parameter.detach(), config, arch, names):
            stored = part.contiguous().numpy()
            is_matrix = stored.ndim > 1 and "ffn_gate_inp" not in gguf_name
            if is_matrix:
                writer.add_tensor(gguf_name, gguf.quantize(stored, qtype), raw_dtype=qtype)
            else:
                writer.add_tensor(gguf_name, stored.astype(np.float32))
    if config.rope_parameters.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = config.rope_parameters["rope_theta"] ** (-torch.arange(8) / 8)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for length in ("long", "short"):
        factors = config.rope_parameters.get(f"{length}_factor")
        if factors:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("tiny", path, "gguf")


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or 16
    latent = getattr(config, "kv_lora_rank", 0)
    writer.add_key_length(latent + head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("factor") and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("original_max_position_embeddings") and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "deepseek2":
        _write_deepseek_metadata(writer, config)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)


def _write_deepseek_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """As for the converter's split `kv_b_proj`: key and value length are those of a cached row."""
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    is_v3 = config.model_type == "deepseek_v3"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_v3 else kinds.SOFTMAX)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    all_dim = config.rope_parameters.get("mscale_all_dim")
    if all_dim:
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)


def _gguf_parts(
    name: str, weight: torch.Tensor, config: Any, arch: str, names: gguf.TensorNameMap
) -> list[tuple[str, torch.Tensor]]:
    if name.endswith("experts.gate_up_proj"):
        layer = name.split(".")[2]
        gate, up = weight.chunk(2, dim=1)
        return [(f"blk.{layer}.ffn_{n}_exps.weight", w) for n, w in (("gate", gate), ("up", up))]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", weight)]
    if name.endswith("kv_b_proj.weight"):
        prefix = f"blk.{name.split('.')[2]}"
        heads = weight.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        return [
            (f"{prefix}.attn_k_b.weight", keys.transpose(1, 2)),
            (f"{prefix}.attn_v_b.weight", values),
        ]
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    if "norm" in name and arch.startswith("gemma"):
        weight = weight + 1
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        weight = halves.transpose(1, 2).reshape(weight.shape)
    gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert gguf_name is not None, name
    return [(gguf_name, weight)]
