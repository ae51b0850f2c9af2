"""Rotary position embeddings (Su et al., arXiv:2104.09864) and the ways to stretch them.

cos and sin are computed in float32 once a step for all layers: that costs less than a table for a
context of 128k tokens is worth. A rotation pairs dimension i with i + rotary_dim / 2:

    rotated = x * cos + swap_halves(x) * sin,  the first half of sin negated

or, interleaved, each even dimension with the next: then neighbours are swapped, and every even
number of sin is negated.
"""

import math
from typing import Any

import torch

from core.errors import ModelError
from engine.model.config import RopeConfig, yarn_mscale


class Rope:
    """Rotates queries and keys of one kind of layer."""

    def __init__(
        self, config: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq, factor = inverse_frequencies(config, max_model_len)
        self.frequencies, self.factor = inv_freq, factor  # as `inverse_frequencies` says
        half = torch.full_like(inv_freq, factor)
        # The two of a pair side by side, or half of the dimensions apart.
        self._is_interleaved = config.is_interleaved
        dim = 1 if config.is_interleaved else 0
        self._inv_freq = torch.stack((inv_freq, inv_freq), dim).flatten().to(device)
        self._sin_factor = torch.stack((-half, half), dim).flatten().to(device)
        self._rotary_dim = config.rotary_dim
        self._dtype = dtype

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the positions, each `[T, 1, rotary_dim]` in the model's dtype."""
        angles = positions.float().view(-1, 1, 1) * self._inv_freq
        cos = angles.cos().mul_(self.factor)
        sin = angles.sin_().mul_(self._sin_factor)
        return cos.to(self._dtype), sin.to(self._dtype)

    def apply(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: `[T, heads, head_dim]`."""
        cos, sin = cos_sin
        rotary = self._rotary_dim
        if rotary == x.shape[-1]:
            return torch.addcmul(x * cos, self._swapped(x), sin)
        turned = x[..., :rotary]
        turned = torch.addcmul(turned * cos, self._swapped(turned), sin)
        return torch.cat((turned, x[..., rotary:]), dim=-1)

    def _swapped(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_interleaved:
            return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x.roll(self._rotary_dim // 2, -1)


def inverse_frequencies(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Angle per position of every pair of dimensions, float32 `[rotary_dim / 2]`, and the factor
    on cos and sin. Raises ModelError for an unknown type or a missing setting."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    powers = config.theta**exponents
    make = _SCALINGS.get(config.rope_type)
    if make is None:
        raise ModelError(
            f"unknown rope type {config.rope_type!r}; known are {', '.join(sorted(_SCALINGS))}"
        )
    return make(config, powers, max_model_len)


def _need(config: RopeConfig, key: str) -> Any:
    value = config.settings.get(key)
    if value is None:
        raise ModelError(f"rope type {config.rope_type!r}: {key} is missing")
    return value


def _default(
    config: RopeConfig, powers: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    return 1.0 / powers, 1.0


def _linear(
    config: RopeConfig, powers: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    return 1.0 / powers / _need(config, "factor"), 1.0


def _llama3(
    config: RopeConfig, powers: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between
    interpolated."""
    inv_freq = 1.0 / powers
    factor = _need(config, "factor")
    low, high = _need(config, "low_freq_factor"), _need(config, "high_freq_factor")
    original = _need(config, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, scaled), 1.0


def _yarn(
    config: RopeConfig, powers: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., arXiv:2309.00071)."""
    settings = config.settings
    original = _need(config, "original_max_position_embeddings")
    factor = settings.get("factor") or config.max_position_embeddings / original
    dim, theta = config.rotary_dim, config.theta

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(settings.get("beta_fast") or 32)
    high = dimension_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        one, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        attention_factor = yarn_mscale(factor, one if one and all_dim else 1)
        if one and all_dim:
            attention_factor /= yarn_mscale(factor, all_dim)
    return inv_freq, float(attention_factor)


def _longrope(
    config: RopeConfig, powers: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., arXiv:2402.13753). The long factors are used for every sequence if
    the context may pass the original length: keys that are cached, shared or handed over must
    not depend on how long their sequence became."""
    original = _need(config, "original_max_position_embeddings")
    factor = config.settings.get("factor") or config.max_position_embeddings / original
    attention_factor = config.settings.get("attention_factor")
    if attention_factor is None:
        stretched = 1 + math.log(factor) / math.log(original) if factor > 1 else 1.0
        attention_factor = math.sqrt(stretched)
    key = "long_factor" if max_model_len > original else "short_factor"
    factors = torch.tensor(_need(config, key), dtype=torch.float32)
    if factors.shape != powers.shape:
        raise ModelError(f"rope: {key} has {factors.numel()} values, expected {powers.numel()}")
    return 1.0 / (factors * powers), float(attention_factor)


def _frequency_factors(
    config: RopeConfig, powers: torch.Tensor, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """llama.cpp stores the outcome of Llama 3's scaling as one divisor for each frequency."""
    factors = torch.tensor(_need(config, "factors"), dtype=torch.float32)
    if factors.shape != powers.shape:
        raise ModelError(f"rope: {factors.numel()} factors, expected {powers.numel()}")
    return 1.0 / (factors * powers), 1.0


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "frequency_factors": _frequency_factors,
}
