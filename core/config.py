"""One YAML file describes a deployment. Errors name the key, the line and what was expected."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from core.config_source import (
    KeyedError,
    apply_override,
    first_problem,
    refuse_duplicates,
    where_set,
)
from core.errors import ConfigError
from core.logs import LogFormat

Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

_PAIR = ("prefill", "decode")
# KV that passes between pools depends on these.
_ALIKE_IN_POOLS = ("quantization", "kv_cache_dtype")
# What a worker that changes its role changes with it; the rest was settled when it loaded.
_OF_A_ROLE = ("max_num_seqs", "max_num_batched_tokens")


class _Section(BaseModel):
    # Strict: `replicas: true` or `"2"` is a mistake, not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SpeculativeConfig(_Section):
    """Guesses checked in one step of decode workers; the output does not change."""

    method: Literal["ngram", "draft_model"]
    # Of draft_model: what guesses, named like the deployment's own model.
    model: Annotated[str, Field(min_length=1)] | None = None
    num_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    # Of ngram: lengths of the repeated ends that are looked for.
    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] = 2
    prompt_lookup_max: Annotated[int, Field(ge=1, le=16)] = 4

    @model_validator(mode="after")
    def _fits_its_method(self) -> "SpeculativeConfig":
        if self.method == "draft_model" and self.model is None:
            raise KeyedError(
                ("model",), "missing, draft_model needs a model that guesses, for example a "
                "smaller one of the same family",
            )  # fmt: skip
        if self.method == "ngram" and self.model is not None:
            raise KeyedError(("model",), "unknown key of method ngram, which needs no model")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise KeyedError(
                ("prompt_lookup_min",),
                f"expected at most prompt_lookup_max ({self.prompt_lookup_max})",
            )
        return self


class EngineConfig(_Section):
    """Limits and numerics of one engine; a pool's `engine` section overrides single keys."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    max_model_len: Positive | None = None
    num_kv_blocks: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    enable_prefix_caching: bool = True
    kv_cache_dtype: Literal["auto", "bf16", "int8", "fp8_e4m3"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    threads: Positive | Literal["auto"] = "auto"
    idle_threads: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    # Of decode workers, seconds from one step to the next while prompts are read beside them.
    decode_pace: Annotated[float, Field(ge=0, le=1)] = 0.03
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Of a GPU's memory: what weights, KV blocks and a step may take together.
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    # Of a process: what weights, KV blocks and a step may take together; None: no limit of its own.
    memory_budget: Annotated[int, Field(ge=1 << 28)] | None = None
    attention: Literal["auto", "torch", "flashinfer"] = "auto"
    cuda_graphs: Literal["auto", "off"] = "auto"
    speculative: SpeculativeConfig | None = None

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _in_bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", value)
        if match is None:
            raise ValueError("expected bytes, or a size like 6 GiB or 800 MB")
        unit = match[2] or ""
        base = 1024 if unit.endswith("i") else 1000
        return int(float(match[1]) * base ** " KMGT".index(unit[:1] or " "))

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of it


class AutoscaleConfig(_Section):
    """Bounds and targets of a pool that follows its load; seconds. Prefill and colocated pools
    hold ttft_p90, decode and colocated pools tpot_p90 and kv_use."""

    min: Positive = 1
    max: Positive
    ttft_p90: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tpot_p90: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    kv_use: Annotated[float, Field(gt=0, le=1)] = 0.8  # share of the KV blocks in use
    up_seconds: Annotated[float, Field(ge=0, le=3600)] = 15.0  # between two steps up
    down_seconds: Annotated[float, Field(ge=1, le=86400)] = 120.0  # of less load before a step down

    @model_validator(mode="after")
    def _bounds_fit(self) -> "AutoscaleConfig":
        if self.min > self.max:
            raise KeyedError(("min",), f"expected at most max ({self.max})")
        return self

    def bounded(self, replicas: int) -> int:
        return min(max(replicas, self.min), self.max)


class PoolConfig(_Section):
    replicas: Annotated[int, Field(ge=0)] = 1
    # Processes that a worker of this pool consists of, each with `resources` of its own.
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] = 1
    resources: dict[str, Amount] = {}
    # On a Ray cluster: labels that a node must have; values in Ray's words: A100, !A100, in(a,b).
    label_selector: dict[str, str] = {}
    runtime_env: dict[str, Any] = {}  # of its processes, as Ray takes it: env_vars, pip ...
    engine: dict[str, Any] = {}
    autoscale: AutoscaleConfig | None = None  # then `replicas` is what the pool starts with
    # What its workers may become without loading again; None: they stay what they are.
    roles: list[Literal["prefill", "decode"]] | None = None


class PoolsConfig(_Section):
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    colocated: PoolConfig = PoolConfig()

    def named(self, name: str) -> PoolConfig:
        """The pool of a role's name."""
        pool: PoolConfig = getattr(self, name)
        return pool


class KVTransferConfig(_Section):
    transport: Literal["auto", "nixl", "grpc"] = "auto"
    lease_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    checksum: bool = True
    # Of KV over gRPC. zstd loses nothing; int8 rounds bfloat16 KV and changes outputs a little.
    compression: Literal["none", "zstd", "int8"] = "none"

    @model_validator(mode="after")
    def _can_compress(self) -> "KVTransferConfig":
        if self.compression != "none" and self.transport == "nixl":
            raise KeyedError(("compression",), "expected none with transport: nixl")
        if self.compression == "int8" and self.checksum:
            raise KeyedError(
                ("compression",),
                "expected checksum: false with int8: what arrives is not what was summed up",
            )
        return self


class SloConfig(_Section):
    """What counts as goodput, and when a first token is too late to be worth starting on: seconds,
    None for no limit."""

    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tpot: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft is not None or self.tpot is not None


class RouterTlsConfig(_Section):
    """PEM files of the router's ports. Read again when they change."""

    cert_file: str
    key_file: str


class TlsConfig(RouterTlsConfig):
    """Of every process towards the others of this deployment (mutual TLS)."""

    ca_file: str


class RouterConfig(_Section):
    http: str = "127.0.0.1:8000"
    grpc: str = "127.0.0.1:8001"
    # /v1/embeddings: how the served model's hidden states become one vector; None: not served.
    embeddings: Literal["mean", "last"] | None = None
    # A file with a chat template instead of the model's own.
    chat_template: str | None = None
    policy: Literal["kv_aware", "least_loaded", "round_robin", "session"] = "kv_aware"
    # Tokens of a prompt that a decode worker may compute itself if that is faster; 0: never.
    max_local_prefill_tokens: Annotated[int, Field(ge=0)] = 0
    # Of the answers of a chat: auto takes the format that the chat template shows.
    tool_parser: Literal["auto", "hermes", "llama3_json", "pythonic", "mistral"] = "auto"
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = None
    # Processes that share both ports; limits hold over all of them.
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    api_keys_file: str | None = None
    tls: RouterTlsConfig | None = None
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    slo: SloConfig = SloConfig()
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    # Sequences in this router, and those of them that may wait for a worker with room.
    max_concurrent_requests: Positive = 1024
    max_queued_requests: Annotated[int, Field(ge=0)] = 512
    max_body_bytes: Positive = 8 * 1024 * 1024

    @field_validator("http", "grpc")
    @classmethod
    def _is_host_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ValueError("expected host:port, for example 127.0.0.1:8000")
        return value

    @model_validator(mode="after")
    def _has_two_ports(self) -> "RouterConfig":
        if self.http == self.grpc and not self.http.endswith(":0"):
            raise KeyedError(("grpc",), f"expected another port than router.http ({self.http})")
        return self


class RayConfig(_Section):
    address: str | None = None


class Config(_Section):
    """A whole deployment."""

    model: Annotated[str, Field(min_length=1)]
    served_model_name: str | None = None
    dtype: Dtype = "auto"
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    engine: EngineConfig = EngineConfig()
    pools: PoolsConfig = PoolsConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    router: RouterConfig = RouterConfig()
    tls: TlsConfig | None = None
    ray: RayConfig = RayConfig()
    log_format: LogFormat = "text"  # of every process; json: an object a line, for a collector

    @model_validator(mode="after")
    def _pools_agree(self) -> "Config":
        for name in ("prefill", "decode", "colocated"):
            self.engine_for(name)
            if self.pools.named(name).label_selector and self.ray.address is None:
                raise KeyedError(
                    ("pools", name, "label_selector"),
                    "expected ray.address with it: a Ray of its own has one node, without labels",
                )
            if self.draft_model_of(name) and self.pools.named(name).tensor_parallel_size > 1:
                raise KeyedError(
                    ("pools", name, "tensor_parallel_size"),
                    "expected 1 with speculative.method draft_model: the draft model has no ranks",
                )
        if self.mode == "disaggregated":
            for key in _ALIKE_IN_POOLS:
                values = {name: getattr(self.engine_for(name), key) for name in _PAIR}
                if len(set(values.values())) > 1:
                    name = next(n for n in _PAIR if key in getattr(self.pools, n).engine)
                    raise KeyedError(
                        ("pools", name, "engine", key),
                        f"expected the same in the prefill and decode pools, got {values}",
                    )
            small, large = sorted(self.engine_for(name).block_size for name in _PAIR)
            if large % small:
                name = next(n for n in _PAIR if "block_size" in getattr(self.pools, n).engine)
                raise KeyedError(
                    ("pools", name, "engine", "block_size"),
                    "expected the prefill and decode pools' block sizes to divide one another, "
                    f"got {small} and {large}",
                )
        for name in ("prefill", "decode", "colocated"):
            self._check_roles(name)
        return self

    def _check_roles(self, name: str) -> None:
        """A worker keeps weights, KV blocks and the resources it has reserved when its role
        changes: there both pools must agree."""
        roles, other = self.roles_of(name), "decode" if name == "prefill" else "prefill"
        if name == "colocated" and self.pools.colocated.roles is not None:
            raise KeyedError(
                ("pools", name, "roles"), "unknown key of this pool: its workers do both already"
            )
        if name not in roles or len(set(roles)) < len(roles):
            raise KeyedError(
                ("pools", name, "roles"),
                f"expected [{name}, {other}] or [{name}], got [{', '.join(roles)}]",
            )
        if len(roles) == 1:
            return
        for key in ("tensor_parallel_size", "resources", "label_selector", "runtime_env"):
            ours, theirs = (getattr(self.pools.named(pool), key) for pool in (name, other))
            if ours != theirs:
                raise KeyedError(
                    ("pools", name, key),
                    f"expected the same as in pools.{other} ({theirs}) with roles, got {ours}",
                )
        ours, theirs = (self.engine_for(pool).model_dump() for pool in (name, other))
        for key in ours:
            if ours[key] != theirs[key] and key not in _OF_A_ROLE:
                where = name if key in self.pools.named(name).engine else other
                raise KeyedError(
                    ("pools", where, "engine", key),
                    f"expected the same in both pools with roles, which may differ in "
                    f"{' and '.join(_OF_A_ROLE)}; got {ours[key]} ({name}) and {theirs[key]}",
                )
        if self.draft_model_of("decode") is not None:
            raise KeyedError(
                ("pools", name, "roles"),
                "expected one role with speculative.method draft_model: prefill workers have no "
                "draft model",
            )

    def roles_of(self, pool: str) -> tuple[str, ...]:
        """What a worker that was started for a pool may be."""
        return tuple(self.pools.named(pool).roles or (pool,))

    def engine_for(self, pool: str) -> EngineConfig:
        """The engine section with the pool's own overrides applied."""
        values = {**self.engine.model_dump(), **getattr(self.pools, pool).engine}
        try:
            return EngineConfig.model_validate(values)
        except ValidationError as error:
            location, message = first_problem(error, values)
            raise KeyedError(("pools", pool, "engine", *location), message) from error

    def draft_model_of(self, pool: str) -> str | None:
        """Which model guesses on the workers of a pool, if one does."""
        speculative = self.engine_for(pool).speculative
        return None if pool == "prefill" or speculative is None else speculative.model

    @property
    def active_pools(self) -> tuple[str, ...]:
        return ("colocated",) if self.mode == "colocated" else ("prefill", "decode")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates a YAML file. `overrides` are `dotted.key=value` strings, the value
    read as YAML. Raises ConfigError with one line that says what is wrong and where."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file") from error
    return parse_config(text, overrides, source=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """`load_config` on text that is already at hand."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
        refuse_duplicates(root, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{where}: not valid YAML: {problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping at the top, like `model: smollm2-135m`")
    for override in overrides:
        apply_override(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        location, message = first_problem(error, data)
        where = where_set(location, overrides, root, source)
        raise ConfigError(f"{where}: {'.'.join(location)}: {message}") from error
