"""The parameters of a model, allocated once in their final dtype and fused shape, and where each
tensor of a checkpoint goes in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.attention import LatentAttention, MultiHeadAttention
from engine.model.config import ModelConfig
from engine.model.layers import (
    ACTIVATION_FUNCTIONS,
    Experts,
    Layer,
    Linear,
    Mlp,
    Norm,
    Projection,
    Router,
    Weights,
    can_pack,
    packed,
)
from engine.model.quantised import Quantization, quantised
from engine.model.sharding import Axis, Shard, Target, joined, target, whole

# DeepSeek's norms inside attention have this one, whatever the config says of the others.
_LATENT_NORM_EPS = 1e-6


@dataclass(slots=True)
class _Replacement:
    """A plain projection that will give way to a quantised or packed one, as soon as the last of
    its tensors is there: a whole model of plain ones never exists."""

    owner: Any
    field: str
    make: Callable[[Linear], Projection]
    missing: set[str]  # tensors


class Allocation:
    """Empty parameters of one rank's part of a model, and under which names a checkpoint fills
    them: `targets` maps each Hugging Face tensor name to what it is copied into."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        self._config = config
        self.dtype = dtype
        self._device = device
        self._shard = shard
        self._norms: list[Norm] = []
        self._tensors_of: dict[int, set[str]] = {}  # of a linear, by its id
        self._replacements: dict[str, _Replacement] = {}  # by tensor
        self.targets: dict[str, Target] = {}
        vocabulary, hidden = shard.vocabulary(config.vocab_size), whole(config.hidden_size)
        embedding = self._linear({"model.embed_tokens": vocabulary}, hidden, False)
        head = embedding
        if not config.tie_word_embeddings:
            head = self._linear({"lm_head": vocabulary}, hidden, False)
        self.weights = Weights(
            embedding=embedding.weight,
            layers=[self._layer(i) for i in range(config.num_layers)],
            norm=self._norm("model.norm", config.hidden_size),
            head=head,
        )

    def plan(self, quantization: Quantization) -> None:
        """Which projections are quantised or packed; a router of experts stays as it is."""
        if quantization != "none":
            self._replace(lambda linear: quantised(linear, quantization))
            # Every logit is read off the head: four bits there cost more than all other layers'.
            self._replace_later(
                self.weights,
                "head",
                lambda head: quantised(head, "int8", expects_many_rows=False),
            )
        elif can_pack(self.dtype, self._device):
            self._replace(packed)
            self._replace_later(self.weights, "head", packed)

    def filled(self, name: str) -> None:
        """A tensor is in its target, which is not needed any more."""
        del self.targets[name]
        replacement = self._replacements.pop(name, None)
        if replacement is None:
            return
        replacement.missing.discard(name)
        if not replacement.missing:
            owner, field = replacement.owner, replacement.field
            setattr(owner, field, replacement.make(getattr(owner, field)))

    def finish(self, norms_include_offset: bool) -> None:
        """After filling: adds norms' offsets."""
        if self._config.family.norm_offset and not norms_include_offset:
            for norm in self._norms:
                norm.weight += 1

    def _replace(self, make: Callable[[Linear], Projection]) -> None:
        for layer in self.weights.layers:
            for field in layer.attention.projections:
                self._replace_later(layer.attention, field, make)
            for mlp in layer.mlp.mlps():
                self._replace_later(mlp, "gate_up", make)
                self._replace_later(mlp, "down", make)

    def _replace_later(self, owner: Any, field: str, make: Callable[[Linear], Projection]) -> None:
        linear = getattr(owner, field)
        if linear is not None:
            names = self._tensors_of[id(linear)]
            replacement = _Replacement(owner, field, make, set(names))
            self._replacements |= dict.fromkeys(names, replacement)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self._device)

    def _norm(self, name: str, size: int, eps: float | None = None) -> Norm:
        # 1 + weight does not fit into a narrow type.
        dtype = torch.float32 if self._config.family.norm_offset else None
        norm = Norm(self._empty(size, dtype=dtype), eps or self._config.norm_eps)
        self.targets[f"{name}.weight"] = target(norm.weight, whole(size))
        self._norms.append(norm)
        return norm

    def _linear(
        self,
        outputs: dict[str, Axis],
        inputs: Axis,
        has_bias: bool,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """One matrix whose rows are those of the named ones, in order."""
        rows = sum(axis.num_own for axis in outputs.values())
        # Of cut inputs each rank has a part of the sum, and one of them the bias.
        has_own_bias = has_bias and not (inputs.is_cut and self._shard.rank)
        bias = self._empty(rows, dtype=dtype) if has_own_bias else None
        linear = Linear(self._empty(rows, inputs.num_own, dtype=dtype), bias)
        start = 0
        for name, axis in outputs.items():
            own = slice(start, start + axis.num_own)
            self.targets[f"{name}.weight"] = target(linear.weight[own], axis, inputs)
            linear.weight[own][axis.num_own - axis.padding :] = 0
            if bias is not None:
                self.targets[f"{name}.bias"] = target(bias[own], axis)
            elif has_bias:
                self.targets[f"{name}.bias"] = Target((axis.size,), [])
            start = own.stop
        names = {f"{name}.weight" for name in outputs}
        if has_bias:
            names |= {f"{name}.bias" for name in outputs}
        self._tensors_of[id(linear)] = names
        return linear

    def _layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}"
        hidden, family = config.hidden_size, config.family
        after = f"{prefix}.post_attention_layernorm"
        before_mlp = f"{prefix}.pre_feedforward_layernorm" if family.post_norms else after
        after_mlp = f"{prefix}.post_feedforward_layernorm"
        has_experts = config.layers[index].has_experts
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            attention=(self._multi_head if config.latent is None else self._latent)(
                f"{prefix}.self_attn"
            ),
            attention_post_norm=self._norm(after, hidden) if family.post_norms else None,
            mlp_norm=self._norm(before_mlp, hidden),
            mlp=self._experts(prefix) if has_experts else self._mlp(f"{prefix}.mlp"),
            mlp_post_norm=self._norm(after_mlp, hidden) if family.post_norms else None,
        )

    def _multi_head(self, prefix: str) -> MultiHeadAttention:
        config, shard, hidden = self._config, self._shard, whole(self._config.hidden_size)
        q = shard.heads(config.num_heads, config.head_dim)
        kv = shard.heads(config.num_kv_heads, config.head_dim)
        qkv = {f"{prefix}.q_proj": q, f"{prefix}.k_proj": kv, f"{prefix}.v_proj": kv}
        if config.family.fused_projections:
            qkv = {f"{prefix}.qkv_proj": joined(q, kv, kv)}
        has_norms = config.family.qk_norm
        return MultiHeadAttention(
            qkv=self._linear(qkv, hidden, config.qkv_bias),
            q_norm=self._norm(f"{prefix}.q_norm", config.head_dim) if has_norms else None,
            k_norm=self._norm(f"{prefix}.k_norm", config.head_dim) if has_norms else None,
            o=self._linear({f"{prefix}.o_proj": hidden}, q, config.o_bias),
            num_heads=shard.num_own_heads(config.num_heads),
            num_kv_heads=shard.num_own_heads(config.num_kv_heads),
            head_dim=config.head_dim,
        )

    def _mlp(
        self, prefix: str, size: int = 0, gate: str = "gate_proj", up: str = "up_proj",
        down: str = "down_proj",
    ) -> Mlp:  # fmt: skip
        config, hidden = self._config, whole(self._config.hidden_size)
        features = self._shard.features(size or config.intermediate_size)
        gate_up = {f"{prefix}.{gate}": features, f"{prefix}.{up}": features}
        if config.family.fused_projections:
            gate_up = {f"{prefix}.gate_up_proj": joined(features, features)}
        return Mlp(
            gate_up=self._linear(gate_up, hidden, config.mlp_bias),
            down=self._linear({f"{prefix}.{down}": hidden}, features, config.mlp_bias),
            activation=ACTIVATION_FUNCTIONS[config.activation],
        )

    def _latent(self, prefix: str) -> LatentAttention:
        config = self._config
        latent = config.latent
        assert latent is not None
        hidden, rank = whole(config.hidden_size), whole(latent.kv_lora_rank)
        q = self._shard.heads(config.num_heads, latent.nope_head_dim + latent.rope_head_dim)
        kv = self._shard.heads(config.num_heads, latent.nope_head_dim + latent.v_head_dim)
        values = self._shard.heads(config.num_heads, latent.v_head_dim)
        q_a = q_a_norm = None
        if latent.q_lora_rank is None:
            q_b = self._linear({f"{prefix}.q_proj": q}, hidden, False)
        else:
            q_rank = whole(latent.q_lora_rank)
            q_a = self._linear({f"{prefix}.q_a_proj": q_rank}, hidden, config.qkv_bias)
            q_a_norm = self._norm(f"{prefix}.q_a_layernorm", q_rank.size, _LATENT_NORM_EPS)
            q_b = self._linear({f"{prefix}.q_b_proj": q}, q_rank, False)
        kv_a = {f"{prefix}.kv_a_proj_with_mqa": whole(rank.size + latent.rope_head_dim)}
        kv_b = self._linear({f"{prefix}.kv_b_proj": kv}, rank, False).weight
        return LatentAttention(
            q_a=q_a,
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a=self._linear(kv_a, hidden, config.qkv_bias),
            kv_a_norm=self._norm(f"{prefix}.kv_a_layernorm", rank.size, _LATENT_NORM_EPS),
            kv_b=kv_b.unflatten(0, (-1, latent.nope_head_dim + latent.v_head_dim)),
            o=self._linear({f"{prefix}.o_proj": hidden}, values, config.o_bias),
            nope_head_dim=latent.nope_head_dim,
        )

    def _experts(self, prefix: str) -> Experts:
        moe, names = self._config.moe, self._config.family.experts
        assert moe is not None and names is not None
        own = (names.gate, names.up, names.down)
        shared = None
        if moe.shared_intermediate_size:
            shared = self._mlp(f"{prefix}.{names.shared}", moe.shared_intermediate_size, *own)
        return Experts(
            router=self._router(f"{prefix}.{names.router}"),
            experts=[
                self._mlp(f"{prefix}.{names.experts}.{i}", moe.intermediate_size, *own)
                for i in range(moe.num_experts)
            ],
            shared=shared,
        )

    def _router(self, prefix: str) -> Router:
        moe = self._config.moe
        assert moe is not None
        # Nearly equal scores decide between experts: DeepSeek's are made in float32.
        dtype = torch.float32 if self._config.family.grouped_experts else None
        experts, hidden = whole(moe.num_experts), whole(self._config.hidden_size)
        linear = self._linear({prefix: experts}, hidden, False, dtype)
        bias = None
        if moe.has_correction_bias:
            bias = self._empty(moe.num_experts, dtype=torch.float32)
            self.targets[f"{prefix}.e_score_correction_bias"] = target(bias, experts)
        return Router(
            linear,
            num_active=moe.num_experts_per_tok,
            normalize=moe.norm_topk_prob,
            scoring=moe.scoring,
            correction_bias=bias,
            num_groups=moe.num_groups,
            num_active_groups=moe.num_active_groups,
            scaling_factor=moe.scaling_factor,
        )
