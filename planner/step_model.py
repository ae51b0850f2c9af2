"""How long one engine step takes on one worker.

A step computes `new` prompt tokens and one token for each of `batch` decoding sequences:

    linear layers      grow with the tokens, never faster than reading the weights once
    prefill attention  grows with `pairs`: n * context + n * n / 2 for a chunk of n tokens
    decode attention   grows with `kv`: the tokens that the decoding sequences attend to
"""

from dataclasses import dataclass
from typing import Protocol

from planner.hardware import Hardware, ModelShape


class StepModel(Protocol):
    def step(self, new: int, pairs: float, batch: int, kv: int) -> float:
        """Seconds of one step."""

    def decode(self, batch: int) -> tuple[float, float]:
        """Seconds of a step without prompts: a fixed part, and a part for each token of `kv`."""


@dataclass(frozen=True, slots=True)
class FittedModel:
    """Coefficients in milliseconds, as fits of measured steps give them.

    `large` holds the three decode coefficients for batches above `large_above`, where a second
    fit exists."""

    prefill_base: float
    per_token: float
    per_pair: float
    decode_base: float
    per_sequence: float
    per_kv_token: float
    large_above: int = 0
    large: tuple[float, float, float] | None = None

    def step(self, new: int, pairs: float, batch: int, kv: int) -> float:
        fixed, per_kv = self.decode(batch)
        if not new:
            return fixed + per_kv * kv
        linear = (self.prefill_base + self.per_token * (new + batch)) / 1e3
        return max(linear, fixed) + self.per_pair * pairs / 1e3 + per_kv * kv

    def decode(self, batch: int) -> tuple[float, float]:
        base, per_sequence, per_kv = self.decode_base, self.per_sequence, self.per_kv_token
        if self.large is not None and batch > self.large_above:
            base, per_sequence, per_kv = self.large
        return (base + per_sequence * batch) / 1e3, per_kv / 1e3


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """From FLOP/s and bandwidth alone, where nothing was measured. The efficiencies bring it
    closest to `planner.fitted.AICONFIGURATOR`: there it is within 0.72 and 1.26 times at usual
    steps, and 9 percent off on average."""

    hardware: Hardware
    shape: ModelShape
    tensor_parallel: int = 1
    flops_efficiency: float = 0.65
    attention_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.7
    overhead_s: float = 5e-4

    def step(self, new: int, pairs: float, batch: int, kv: int) -> float:
        fixed, per_kv = self._fixed(new + batch), self.decode(batch)[1]
        flops = 4.0 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * pairs
        peak = self.hardware.flops * self.tensor_parallel * self.attention_efficiency
        return fixed + flops / peak + per_kv * kv

    def decode(self, batch: int) -> tuple[float, float]:
        per_kv = self.shape.kv_bytes_per_token / self._bandwidth
        return self._fixed(batch), per_kv

    @property
    def _bandwidth(self) -> float:
        return self.hardware.memory_bandwidth * self.bandwidth_efficiency * self.tensor_parallel

    def _fixed(self, tokens: int) -> float:
        """Linear layers, and two all-reduces a layer under tensor parallelism."""
        shape, tp = self.shape, self.tensor_parallel
        compute = 2.0 * shape.active_parameters * tokens
        compute /= self.hardware.flops * self.flops_efficiency * tp
        seconds = self.overhead_s + max(shape.weight_bytes / self._bandwidth, compute)
        if tp > 1:
            moved = 2.0 * (tp - 1) / tp * tokens * shape.hidden_size * 2
            each = moved / self.hardware.peer_bandwidth + self.hardware.peer_latency
            seconds += 2 * shape.num_layers * each
        return seconds
