"""The pieces of a decoder layer, as plain dataclasses of tensors. Inference only."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from engine import native
from engine.model.config import Scoring

ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# Rope at this step's positions, of `[T, heads, dim]`.
Rotate = Callable[[torch.Tensor], torch.Tensor]
# Paged attention of one layer: query, key and value, as `AttentionBackend.forward` has them.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Projection(Protocol):
    """x `[T, in]` -> `[T, out]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Attention(Protocol):
    """x `[T, hidden]`, normed -> what `o` takes, `[T, in]`. `projections` names the fields that
    may be quantised or packed."""

    projections: ClassVar[tuple[str, ...]]
    o: Projection

    def __call__(self, x: torch.Tensor, rotate: Rotate, attend: Attend) -> torch.Tensor: ...


@dataclass(slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class PackedLinear:
    """A weight in the order in which oneDNN's kernel reads it. F.linear reorders on every call;
    without that a decode step is 1.4 to 1.8 times faster."""

    weight: torch.Tensor  # opaque
    bias: torch.Tensor | None
    tiles: native.Weight | None  # how native products read the weight, if they can

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.tiles is not None and x.shape[0] <= native.MAX_ROWS:
            return native.linear(x, self.tiles)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def packed(linear: Linear) -> PackedLinear:
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, native.PACKED_FOR_ROWS)
    tiles = native.tiles_address(weight, linear.weight)
    num_outputs, num_inputs = linear.weight.shape
    read = None
    if tiles is not None:
        read = native.Weight("plain", tiles, None, linear.bias, num_inputs, num_outputs)
    return PackedLinear(weight, linear.bias, read)


def native_weight(projection: Projection) -> native.Weight | None:
    """How native code reads the weight, if it can."""
    tiles = getattr(projection, "tiles", None)
    return tiles if isinstance(tiles, native.Weight) else None


@dataclass(slots=True)
class Norm:
    """RMS norm (Zhang and Sennrich, arXiv:1910.07467), accumulated in float32. A float32 weight
    in a narrower model is Gemma's: its product is rounded once, after the weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if native.can_norm(x, self.weight):
            return native.rms_norm(x, self.weight, self.eps)
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.rms_norm(x.float(), shape, self.weight, self.eps).to(x.dtype)


@dataclass(slots=True)
class Mlp:
    gate_up: Projection  # gate's rows, then up's
    down: Projection
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        if self.activation is F.silu and native.can_silu_mul(gate_up):
            return self.down(native.silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))

    def mlps(self) -> "list[Mlp]":
        return [self]


@dataclass(slots=True)
class Router:
    """Chooses each token's experts: x `[T, hidden]` -> weights float32 and experts, `[T, k]`.

    With groups (DeepSeek-V3, arXiv:2412.19437) only experts of the best groups are chosen; a
    correction bias moves the choice, never the weights."""

    linear: Linear  # in float32 if its weight is
    num_active: int
    normalize: bool  # weights of the chosen experts sum to 1
    scoring: Scoring = "softmax"
    correction_bias: torch.Tensor | None = None  # float32 [experts]
    num_groups: int = 1
    num_active_groups: int = 1
    scaling_factor: float = 1.0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x.to(self.linear.weight.dtype))
        if self.scoring == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            scores = torch.sigmoid(logits.float())
        choice = scores if self.correction_bias is None else scores + self.correction_bias
        if self.num_groups > 1:
            choice = self._of_best_groups(choice)
        chosen = torch.topk(choice, self.num_active, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.mul_(self.scaling_factor), chosen

    def _of_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """A group is as good as its best expert, or as its best two with a correction bias."""
        groups = choice.unflatten(1, (self.num_groups, -1))  # [T, groups, experts of a group]
        best = torch.topk(groups, 1 if self.correction_bias is None else 2, dim=-1).values
        active = torch.topk(best.sum(-1), self.num_active_groups, dim=-1).indices
        is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=choice.device)
        is_left_out.scatter_(1, active, False)
        return groups.masked_fill(is_left_out.unsqueeze(-1), -math.inf).flatten(1)


@dataclass(slots=True)
class Experts:
    """A mixture of experts: every token goes through its best few, weighted, and the shared one."""

    router: Router
    experts: list[Mlp]
    shared: Mlp | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        num_active = chosen.shape[1]
        chosen = chosen.flatten()
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        tokens = order // num_active
        weights = weights.flatten()[order].to(x.dtype).unsqueeze(1)
        out = torch.zeros_like(x) if self.shared is None else self.shared(x)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, expert(x[rows]) * weights[start : start + count])
                start += count
        return out

    def mlps(self) -> list[Mlp]:
        return [*self.experts, *([] if self.shared is None else [self.shared])]


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer. The post norms are Gemma's."""

    input_norm: Norm
    attention: Attention
    attention_post_norm: Norm | None
    mlp_norm: Norm
    mlp: Mlp | Experts
    mlp_post_norm: Norm | None


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: Norm
    head: Projection
