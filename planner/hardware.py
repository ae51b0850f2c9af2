"""Small tables of accelerators and models: what a plan needs before anything is measured."""

from dataclasses import dataclass

from core.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator, by its data sheet. Bytes and seconds."""

    name: str
    flops: float  # dense bf16
    memory_bandwidth: float
    memory_bytes: int
    peer_bandwidth: float  # inside a node, one direction
    peer_latency: float
    network_bandwidth: float  # between nodes, for each accelerator, one direction
    per_node: int = 8


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    parameters: float
    active_parameters: float  # those that one token meets, the embedding table left out
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


# FLOP/s, bandwidths and memory: systems/*.yaml of PyPI aiconfigurator-core 0.12.0 (Apache-2.0).
HARDWARE = {
    h.name: h
    for h in (
        Hardware("a100", 312e12, 2.039e12, 80 * _GIB, 300e9, 10e-6, 25e9),
        Hardware("h100", 989e12, 3.35e12, 80 * _GIB, 450e9, 10e-6, 50e9),
        Hardware("h200", 989e12, 4.8e12, 141 * _GIB, 450e9, 10e-6, 50e9),
    )
}

# The models' own config.json; parameters as their cards say.
MODELS = {
    m.name: m
    for m in (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 0.1345e9, 0.1345e9),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 0.60e9, 0.60e9),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 7.24e9, 7.11e9),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 8.03e9, 7.50e9),
        ModelShape("opt-13b", 40, 5120, 40, 40, 128, 12.85e9, 12.85e9),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 32.8e9, 32.0e9),
        ModelShape("opt-66b", 64, 9216, 72, 72, 128, 65.7e9, 65.7e9),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 69.0e9, 68.7e9),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 70.6e9, 69.5e9),
    )
}

# Of an accelerator's memory, for weights and KV; the rest is activations and the runtime.
_MEMORY_SHARE = 0.9


def find_hardware(name: str) -> Hardware:
    if name.lower() not in HARDWARE:
        raise ConfigError(f"hardware {name}: not known; known are {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]


def find_model(name: str) -> ModelShape:
    if name.lower() not in MODELS:
        raise ConfigError(f"model {name}: shape not known; known are {', '.join(MODELS)}")
    return MODELS[name.lower()]


def kv_capacity(hardware: Hardware, shape: ModelShape, tensor_parallel: int) -> int:
    """Tokens of KV that fit beside the weights; 0 if the weights alone do not fit."""
    memory = hardware.memory_bytes * _MEMORY_SHARE * tensor_parallel - shape.weight_bytes
    return max(0, int(memory / shape.kv_bytes_per_token))


def degrees(shape: ModelShape, hardware: Hardware, gpus: int) -> list[int]:
    """Tensor-parallel degrees that split the heads evenly, fit the memory and stay in a node."""
    return [
        tp
        for tp in (1, 2, 4, 8)
        if tp <= min(gpus, hardware.per_node)
        and shape.num_heads % tp == 0
        and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)
        and kv_capacity(hardware, shape, tp) > 0
    ]
