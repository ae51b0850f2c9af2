"""GGUF checkpoints, as llama.cpp writes them, under Hugging Face names and dtypes.

llama.cpp stores the query and key rows of the `llama` architecture in another order (rope there
turns neighbouring dimensions), Gemma's norms with their offset added, experts as one tensor, and
Llama 3's rope scaling as a tensor of divisors; all of that is undone here.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from core.errors import ModelError
from core.gguf_metadata import read_gguf_metadata
from engine.model import gguf_deepseek
from engine.model.families import FAMILIES
from engine.model.host_memory import release_pages

_CHUNK_ELEMENTS = 1 << 20
# GGUF architecture -> Hugging Face model type.
_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "deepseek2": "deepseek_v2",
}
# Without a number in the metadata, llama.cpp knows the 27B models by their depth: their scores
# are scaled by hidden_size / num_heads instead of head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Not weights: divisors of rope frequencies, read into the config.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GGUFSource:
    """One .gguf file, memory mapped; tensors are dequantized as they are read."""

    is_mapped = False  # most are copies

    def __init__(self, path: Path) -> None:
        metadata = read_gguf_metadata(path, "general.")
        arch = str(metadata.get("general.architecture"))
        if arch not in _MODEL_TYPES:
            known = ", ".join(sorted(_MODEL_TYPES))
            raise ModelError(f"{path}: unknown GGUF architecture {arch!r}; known are {known}")
        try:
            # Copy on write: numpy hands out writable views, as torch wants, of a file opened
            # for reading.
            tensors = _TensorReader(path, "c").tensors
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path}: not a readable GGUF file: {error}") from error
        self._arch = arch
        self._tensors = {tensor.name: tensor for tensor in tensors}
        values = read_gguf_metadata(path, f"{arch}.")
        self.config = self._config({k.removeprefix(f"{arch}."): v for k, v in values.items()})
        self._family = FAMILIES[self.config["model_type"]]
        self.norms_include_offset = self._family.norm_offset
        self._sources: dict[str, str] = {}  # Hugging Face name -> GGUF name
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._tensors.items():
            shape = tuple(int(n) for n in reversed(tensor.shape))
            for hf_name, hf_shape in self._renamed(name, shape):
                self._sources[hf_name] = name
                self.shapes[hf_name] = hf_shape

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            shape = tuple(int(n) for n in reversed(tensor.shape))
            renamed = self._renamed(name, shape)
            if not renamed:
                continue
            values = dequantize(tensor.data, tensor.tensor_type, dtype).view(shape)
            if len(renamed) > 1:
                yield from ((hf, part) for (hf, _), part in zip(renamed, values, strict=True))
                del values
            else:
                whole = [self._reordered(name, values)]
                del values
                yield renamed[0][0], whole.pop()  # the only reference: the reader may free it
            release_pages(tensor.data.ctypes.data, tensor.data.nbytes)

    def sample(self, name: str) -> bytes:
        tensor = self._tensors[self._sources[name]]
        flat = tensor.data.reshape(-1).view(np.uint8)
        starts = (0, flat.size // 2, max(0, flat.size - 64))
        pieces = [flat[start : start + 64].tobytes() for start in starts]
        release_pages(tensor.data.ctypes.data, tensor.data.nbytes)  # it maps many around one
        return tensor.tensor_type.name.encode() + b"".join(pieces)

    def _renamed(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Hugging Face names and shapes of a tensor: many for a tensor of experts."""
        if name in _ROPE_TENSORS:
            return []
        if name in _GLOBAL_NAMES:
            return [(_GLOBAL_NAMES[name], shape)]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None:
            return [(name, shape)]  # refused by the loader, by this name
        layer, part, kind = match.groups()
        if self._family.latent_attention and part in ("attn_k_b", "attn_v_b"):
            return self._kv_b(layer, part, shape)
        experts = self._family.experts
        if experts is not None and part == "ffn_gate_inp":
            return [(f"model.layers.{layer}.{experts.router}.{kind}", shape)]
        if experts is not None and part == "exp_probs_b":
            return [(f"model.layers.{layer}.{experts.router}.e_score_correction_bias", shape)]
        if experts is not None and (found := re.fullmatch(r"ffn_(gate|up|down)_exps", part)):
            prefix = f"model.layers.{layer}.{experts.experts}"
            own = getattr(experts, found[1])
            return [(f"{prefix}.{e}.{own}.{kind}", shape[1:]) for e in range(shape[0])]
        hf = self._layer_names().get(part)
        return [(name if hf is None else f"model.layers.{layer}.{hf}.{kind}", shape)]

    def _kv_b(
        self, layer: str, part: str, shape: tuple[int, ...]
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Both halves become one tensor, which is read where the keys are."""
        other = self._tensors.get(f"blk.{layer}.attn_v_b.weight")
        if part == "attn_v_b" or other is None:
            return []
        heads, rank, nope = shape
        rows = heads * (nope + int(other.shape[1]))
        return [(f"model.layers.{layer}.self_attn.kv_b_proj.weight", (rows, rank))]

    def _layer_names(self) -> dict[str, str]:
        names = dict(_LAYER_NAMES)
        if self._family.latent_attention:
            names |= gguf_deepseek.LAYER_NAMES
        if self._family.fused_projections:
            names["ffn_up"] = "mlp.gate_up_proj"
        if self._family.post_norms:
            names["post_attention_norm"] = "post_attention_layernorm"
            names["ffn_norm"] = "pre_feedforward_layernorm"
            names["post_ffw_norm"] = "post_feedforward_layernorm"
        else:
            names["ffn_norm"] = "post_attention_layernorm"
        return names

    def _reordered(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Undoes llama.cpp's order of query and key rows, and its split of `kv_b_proj`."""
        if self._family.latent_attention and ".attn_k_b." in name:
            values_name = name.replace("attn_k_b", "attn_v_b")
            other = self._tensors[values_name]
            shape = tuple(int(n) for n in reversed(other.shape))
            return gguf_deepseek.merged_kv_b(
                values, dequantize(other.data, other.tensor_type).view(shape)
            )
        match = re.search(r"\.attn_([qk])\.", name)
        if self._arch != "llama" or match is None:
            return values
        heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        rows, rest = values.shape[0], values.shape[1:]
        pairs = values.view(heads, rows // heads // 2, 2, *rest)
        return pairs.transpose(1, 2).reshape(rows, *rest)

    def _config(self, values: dict[str, Any]) -> dict[str, Any]:
        config = {hf: values[key] for key, hf in _KEYS.items() if key in values}
        config["model_type"] = _MODEL_TYPES[self._arch]
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = False
        if self._arch == "llama" and config.get("num_experts"):
            config["model_type"] = "mixtral"
        if self._arch == "qwen3moe":
            config["norm_topk_prob"] = True
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        if "token_embd.weight" in self._tensors:
            config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        if not isinstance(heads, int) or not isinstance(hidden, int):
            raise ModelError(
                "GGUF metadata: head_count or embedding_length is missing or no number"
            )
        config.setdefault("head_dim", hidden // heads)
        rotary = values.get("rope.dimension_count", config["head_dim"])
        config["partial_rotary_factor"] = rotary / config["head_dim"]
        if self._arch in _GEMMA_27B_LAYERS:
            is_27b = config.get("num_hidden_layers") == _GEMMA_27B_LAYERS[self._arch]
            config["query_pre_attn_scalar"] = hidden // heads if is_27b else config["head_dim"]
        if self._arch == "deepseek2":
            del config["partial_rotary_factor"]
            config |= gguf_deepseek.config_of(values)
        scaling = self._rope_scaling(values)
        if scaling:
            config["rope_scaling"] = scaling
        return config

    def _rope_scaling(self, values: dict[str, Any]) -> dict[str, Any]:
        kind = values.get("rope.scaling.type", "none")
        scaling = {
            "factor": values.get("rope.scaling.factor"),
            "attention_factor": values.get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        }
        if "rope_factors_long.weight" in self._tensors:
            for length in ("long", "short"):
                scaling[f"{length}_factor"] = self._floats(f"rope_factors_{length}.weight")
            return {**scaling, "rope_type": "longrope"}
        if "rope_freqs.weight" in self._tensors:
            return {
                "rope_type": "frequency_factors",
                "factors": self._floats("rope_freqs.weight"),
            }
        if kind == "none":
            return {}
        return {**scaling, **gguf_deepseek.scaling_of(values), "rope_type": kind}

    def _floats(self, name: str) -> list[float]:
        if name not in self._tensors:
            raise ModelError(f"GGUF tensor {name} is missing")
        tensor = self._tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).flatten().tolist()


class _TensorReader(gguf.GGUFReader):
    """Skips arrays in the metadata: a vocabulary would take two seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        kind = gguf.GGUFValueType
        if kind(raw_type) != kind.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, count = kind(self._get(orig_offs, np.uint32)[0]), self._get(orig_offs + 4, np.uint64)
        at = orig_offs + 12
        if item == kind.STRING:
            data = memoryview(self.data)
            for _ in range(int(count[0])):
                at += 8 + int.from_bytes(data[at : at + 8], "little")
        else:
            at += int(count[0]) * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        return at - orig_offs, [], [], [kind.ARRAY]


# ---------------------------------------------------------------- dequantization


def dequantize(
    data: np.ndarray, kind: gguf.GGMLQuantizationType, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values of a tensor in `dtype`, or in its own if that is a float type of torch.

    The common kinds are unpacked by torch, five times faster than by the `gguf` package, which
    does all others. Raises ModelError for a kind that it does not know."""
    kinds = gguf.GGMLQuantizationType
    if kind in (kinds.F32, kinds.F16):
        return torch.from_numpy(data)
    if kind == kinds.BF16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    rows = data.reshape(-1, data.shape[-1])
    out = torch.empty(rows.shape[0], rows.shape[1] // type_size * block_size, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // out.shape[1])
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        if kind in _UNPACK:
            blocks = torch.from_numpy(part.reshape(-1, type_size))
            values = torch.empty(blocks.shape[0], block_size)
            _UNPACK[kind](blocks, values)
            out[start : start + step] = values.view(part.shape[0], -1)
        else:
            try:
                out[start : start + step] = torch.from_numpy(gguf.dequantize(part, kind))
            except NotImplementedError as error:
                raise ModelError(f"GGUF quantization {kind.name} is not known") from error
    return out


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _unpack_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _unpack_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale = _half(blocks, 0)
    packed = blocks[:, 2:]
    out[:, :16] = ((packed & 15).float() - 8).mul_(scale)
    out[:, 16:] = ((packed >> 4).float() - 8).mul_(scale)


def _unpack_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, least = _half(blocks, 0), _half(blocks, 2)
    packed = blocks[:, 4:]
    out[:, :16] = (packed & 15).float().mul_(scale).add_(least)
    out[:, 16:] = (packed >> 4).float().mul_(scale).add_(least)


_UNPACK: dict[gguf.GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    gguf.GGMLQuantizationType.Q8_0: _unpack_q8_0,
    gguf.GGMLQuantizationType.Q4_0: _unpack_q4_0,
    gguf.GGMLQuantizationType.Q4_1: _unpack_q4_1,
}
