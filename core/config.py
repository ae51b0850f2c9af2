"""One YAML file describes a deployment. Errors name the key, the line and what was expected."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from core.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(_Section):
    """Limits and numerics of one engine; a pool's `engine` section overrides single keys."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    max_model_len: Positive | None = None
    num_kv_blocks: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    enable_prefix_caching: bool = True
    kv_cache_dtype: Literal["auto"] = "auto"
    quantization: Literal["none"] = "none"
    threads: Positive | Literal["auto"] = "auto"


class PoolConfig(_Section):
    replicas: Annotated[int, Field(ge=0)] = 1
    tensor_parallel_size: Literal[1] = 1
    resources: dict[str, float] = {}
    engine: dict[str, Any] = {}


class PoolsConfig(_Section):
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    colocated: PoolConfig = PoolConfig()


class KVTransferConfig(_Section):
    transport: Literal["auto", "nixl", "grpc"] = "auto"
    lease_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    checksum: bool = True


class RouterConfig(_Section):
    http: str = "127.0.0.1:8000"
    grpc: str = "127.0.0.1:8001"
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = "kv_aware"
    api_keys_file: None = None
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    max_concurrent_requests: Positive = 1024
    max_body_bytes: Positive = 8 * 1024 * 1024

    @field_validator("http", "grpc")
    @classmethod
    def _is_host_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError("expected host:port, for example 127.0.0.1:8000")
        return value


class RayConfig(_Section):
    address: str | None = None


class Config(_Section):
    """A whole deployment."""

    model: str
    served_model_name: str | None = None
    dtype: Dtype = "auto"
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    engine: EngineConfig = EngineConfig()
    pools: PoolsConfig = PoolsConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    router: RouterConfig = RouterConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _pools_agree(self) -> "Config":
        for name in ("prefill", "decode", "colocated"):
            self.engine_for(name)
        if self.mode == "disaggregated":
            sizes = {name: self.engine_for(name).block_size for name in ("prefill", "decode")}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"pools: block_size must be equal in both pools, got {sizes}")
        return self

    def engine_for(self, pool: str) -> EngineConfig:
        """The engine section with the pool's own overrides applied."""
        own = getattr(self.pools, pool).engine
        try:
            return EngineConfig.model_validate({**self.engine.model_dump(), **own})
        except ValidationError as error:
            raise ValueError(f"pools.{pool}.engine: {_first(error)}") from error

    @property
    def active_pools(self) -> tuple[str, ...]:
        return ("colocated",) if self.mode == "colocated" else ("prefill", "decode")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates a YAML file. `overrides` are `dotted.key=value` strings, the value
    read as YAML. Raises ConfigError with one line that says what is wrong and where."""
    path = Path(path)
    try:
        text = path.read_text()
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
        _refuse_duplicates(root, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping at the top, like `model: smollm2-135m`")
    for override in overrides:
        _apply(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        location = tuple(str(part) for part in error.errors()[0]["loc"])
        line = _line_of(root, location)
        where = f"{source}:{line}" if line else source
        raise ConfigError(f"{where}: {_first(error)}") from error


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected key=value, for example dtype=float32")
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent} is not a section")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: value is not valid YAML") from error


def _first(error: ValidationError) -> str:
    """One line for the first problem: the dotted key and what was expected."""
    problem = error.errors()[0]
    # A union adds the name of the branch tried as a last, lower-level location part.
    key = ".".join(str(p) for p in problem["loc"] if not str(p).startswith(("constrained", "lit")))
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key}: missing, a value is required"
    got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return f"{key}: {message}{got}" if key else message


def _line_of(node: yaml.Node | None, location: tuple[str, ...]) -> int | None:
    """Line of the deepest part of `location` that the file holds; 1-based."""
    line = None
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            break
        for key, value in node.value:
            if key.value == part:
                line, node = key.start_mark.line + 1, value
                break
        else:
            break
    return line


def _refuse_duplicates(node: yaml.Node | None, source: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if key.value in seen:
            raise ConfigError(f"{source}:{key.start_mark.line + 1}: {key.value}: key given twice")
        seen.add(key.value)
        _refuse_duplicates(value, source)
