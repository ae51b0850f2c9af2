from rpc import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("version", "workers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerEntry]
    def __init__(self, version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerEntry, _Mapping]]] = ...) -> None: ...

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

class ShutdownRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
