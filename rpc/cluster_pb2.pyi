from rpc import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_KIND_UNSPECIFIED: _ClassVar[ChangeKind]
    CHANGE_KIND_SCALE: _ClassVar[ChangeKind]
    CHANGE_KIND_ROLLOUT: _ClassVar[ChangeKind]
    CHANGE_KIND_RESTART: _ClassVar[ChangeKind]
CHANGE_KIND_UNSPECIFIED: ChangeKind
CHANGE_KIND_SCALE: ChangeKind
CHANGE_KIND_ROLLOUT: ChangeKind
CHANGE_KIND_RESTART: ChangeKind

class WatchRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("version", "workers", "is_ending")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    IS_ENDING_FIELD_NUMBER: _ClassVar[int]
    version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerEntry]
    is_ending: bool
    def __init__(self, version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerEntry, _Mapping]]] = ..., is_ending: _Optional[bool] = ...) -> None: ...

class WorkerEntry(_message.Message):
    __slots__ = ("id", "role", "state", "host", "pid", "address", "incarnation", "detail")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: _worker_pb2.Role
    state: _worker_pb2.WorkerState
    host: str
    pid: int
    address: str
    incarnation: str
    detail: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., state: _Optional[_Union[_worker_pb2.WorkerState, str]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class QueueReport(_message.Message):
    __slots__ = ("router_id", "prompts", "prompt_tokens", "oldest_seconds", "refused_prompts_total", "refused_prompt_tokens_total")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PROMPTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    prompts: int
    prompt_tokens: int
    oldest_seconds: float
    refused_prompts_total: int
    refused_prompt_tokens_total: int
    def __init__(self, router_id: _Optional[str] = ..., prompts: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., oldest_seconds: _Optional[float] = ..., refused_prompts_total: _Optional[int] = ..., refused_prompt_tokens_total: _Optional[int] = ...) -> None: ...

class QueueReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitReadyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitReadyResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("config_yaml", "overrides", "dry_run")
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    config_yaml: str
    overrides: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    def __init__(self, config_yaml: _Optional[str] = ..., overrides: _Optional[_Iterable[str]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("replicas",)
    class ReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.ScalarMap[str, int]
    def __init__(self, replicas: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., grace_seconds: _Optional[float] = ...) -> None: ...

class SwitchWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "role", "grace_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    grace_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., grace_seconds: _Optional[float] = ...) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pools: _Optional[_Iterable[str]] = ...) -> None: ...

class OperationEvent(_message.Message):
    __slots__ = ("text", "changes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    text: str
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, text: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("key", "before", "after", "kind")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    after: str
    kind: ChangeKind
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., kind: _Optional[_Union[ChangeKind, str]] = ...) -> None: ...
