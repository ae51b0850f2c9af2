from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_COLOCATED: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_OBJECT: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_EBNF: _ClassVar[GrammarKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_COLOCATED: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DEAD: WorkerState
POOLING_UNSPECIFIED: Pooling
POOLING_MEAN: Pooling
POOLING_LAST: Pooling
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_JSON_OBJECT: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_EBNF: GrammarKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("id", "role", "host", "pid", "address", "incarnation", "model", "compatibility", "max_model_len", "block_size", "num_kv_blocks", "kv_block_bytes", "transports", "max_num_seqs", "ranks", "prefix_caching", "max_batched_tokens", "steps_address")
    class CompatibilityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: Role
    host: str
    pid: int
    address: str
    incarnation: str
    model: str
    compatibility: _containers.ScalarMap[str, str]
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    kv_block_bytes: int
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    max_num_seqs: int
    ranks: _containers.RepeatedCompositeFieldContainer[KvRankInfo]
    prefix_caching: bool
    max_batched_tokens: int
    steps_address: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., compatibility: _Optional[_Mapping[str, str]] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., kv_block_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., max_num_seqs: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[KvRankInfo, _Mapping]]] = ..., prefix_caching: _Optional[bool] = ..., max_batched_tokens: _Optional[int] = ..., steps_address: _Optional[str] = ...) -> None: ...

class KvRankInfo(_message.Message):
    __slots__ = ("address", "incarnation", "transports")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "payload")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    payload: bytes
    def __init__(self, name: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("state", "kv_blocks", "requests_running", "requests_waiting", "tokens_prefilled_total", "tokens_decoded_total", "prefix_hit_tokens_total", "kv_bytes_sent_total", "kv_bytes_received_total", "transfers_ok_total", "transfers_failed_total", "transport", "waiting_prefill_tokens", "seconds_since_progress", "preemptions_total", "aborts_total", "tokens_drafted_total", "tokens_draft_accepted_total", "rdma_fallbacks_total", "speculative_method", "draft_pauses_total", "requests_total", "controller", "prefill_tokens_per_second", "decode_step_seconds", "decode_sequence_seconds", "links")
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PREFILLED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DECODED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_OK_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ABORTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DRAFTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DRAFT_ACCEPTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RDMA_FALLBACKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PAUSES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    kv_blocks: KvBlockCounts
    requests_running: int
    requests_waiting: int
    tokens_prefilled_total: int
    tokens_decoded_total: int
    prefix_hit_tokens_total: int
    kv_bytes_sent_total: int
    kv_bytes_received_total: int
    transfers_ok_total: int
    transfers_failed_total: int
    transport: str
    waiting_prefill_tokens: int
    seconds_since_progress: float
    preemptions_total: int
    aborts_total: int
    tokens_drafted_total: int
    tokens_draft_accepted_total: int
    rdma_fallbacks_total: int
    speculative_method: str
    draft_pauses_total: int
    requests_total: int
    controller: str
    prefill_tokens_per_second: float
    decode_step_seconds: float
    decode_sequence_seconds: float
    links: _containers.RepeatedCompositeFieldContainer[LinkSpeed]
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., kv_blocks: _Optional[_Union[KvBlockCounts, _Mapping]] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., tokens_prefilled_total: _Optional[int] = ..., tokens_decoded_total: _Optional[int] = ..., prefix_hit_tokens_total: _Optional[int] = ..., kv_bytes_sent_total: _Optional[int] = ..., kv_bytes_received_total: _Optional[int] = ..., transfers_ok_total: _Optional[int] = ..., transfers_failed_total: _Optional[int] = ..., transport: _Optional[str] = ..., waiting_prefill_tokens: _Optional[int] = ..., seconds_since_progress: _Optional[float] = ..., preemptions_total: _Optional[int] = ..., aborts_total: _Optional[int] = ..., tokens_drafted_total: _Optional[int] = ..., tokens_draft_accepted_total: _Optional[int] = ..., rdma_fallbacks_total: _Optional[int] = ..., speculative_method: _Optional[str] = ..., draft_pauses_total: _Optional[int] = ..., requests_total: _Optional[int] = ..., controller: _Optional[str] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_step_seconds: _Optional[float] = ..., decode_sequence_seconds: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkSpeed, _Mapping]]] = ...) -> None: ...

class LinkSpeed(_message.Message):
    __slots__ = ("peer_incarnation", "bytes_per_second")
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peer_incarnation: str
    bytes_per_second: float
    def __init__(self, peer_incarnation: _Optional[str] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class KvBlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "running", "held", "awaiting")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    AWAITING_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    running: int
    held: int
    awaiting: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., running: _Optional[int] = ..., held: _Optional[int] = ..., awaiting: _Optional[int] = ...) -> None: ...

class WatchKvBlocksRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class KvBlockEvents(_message.Message):
    __slots__ = ("incarnation", "sequence", "is_snapshot", "removed", "stored")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sequence: int
    is_snapshot: bool
    removed: _containers.RepeatedScalarFieldContainer[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., removed: _Optional[_Iterable[int]] = ..., stored: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "pid")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "stop_token_ids", "grammar", "prompt_logprobs", "pooling")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    prompt_logprobs: int
    pooling: Pooling
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, str]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "value")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    value: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., value: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_index", "tokens")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class GenerationRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "output_token_ids", "sampling", "cache_salt", "client_request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    cache_salt: str
    client_request_id: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., client_request_id: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "incarnation", "hand_over")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    request: GenerationRequest
    incarnation: str
    hand_over: bool
    def __init__(self, request: _Optional[_Union[GenerationRequest, _Mapping]] = ..., incarnation: _Optional[str] = ..., hand_over: _Optional[bool] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "first_token", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    first_token: FirstToken
    prompt_logprobs: PromptLogprobs
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_seconds")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_seconds: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "finish_reason", "prefill_seconds", "chunks", "embedding")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    token: Token
    finish_reason: FinishReason
    prefill_seconds: float
    chunks: _containers.RepeatedCompositeFieldContainer[PrefillChunk]
    embedding: bytes
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., prefill_seconds: _Optional[float] = ..., chunks: _Optional[_Iterable[_Union[PrefillChunk, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("num_tokens", "offset_seconds", "seconds")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    offset_seconds: float
    seconds: float
    def __init__(self, num_tokens: _Optional[int] = ..., offset_seconds: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class StepsHello(_message.Message):
    __slots__ = ("stream_id", "incarnation", "cluster_token")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    incarnation: str
    cluster_token: str
    def __init__(self, stream_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., cluster_token: _Optional[str] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("sequences", "step_numbers", "indexes", "token_ids", "refusal")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceTokens]
    step_numbers: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    refusal: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceTokens, _Mapping]]] = ..., step_numbers: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., refusal: _Optional[str] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("request_id", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: Tokens
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request", "incarnation", "source", "steps", "step_number")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    request: GenerationRequest
    incarnation: str
    source: PeerAddress
    steps: str
    step_number: int
    def __init__(self, request: _Optional[_Union[GenerationRequest, _Mapping]] = ..., incarnation: _Optional[str] = ..., source: _Optional[_Union[PeerAddress, _Mapping]] = ..., steps: _Optional[str] = ..., step_number: _Optional[int] = ...) -> None: ...

class PeerAddress(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("started", "tokens", "prompt_logprobs", "steps_ended")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEPS_ENDED_FIELD_NUMBER: _ClassVar[int]
    started: DecodeStarted
    tokens: Tokens
    prompt_logprobs: PromptLogprobs
    steps_ended: StepsEnded
    def __init__(self, started: _Optional[_Union[DecodeStarted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., steps_ended: _Optional[_Union[StepsEnded, _Mapping]] = ...) -> None: ...

class StepsEnded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeStarted(_message.Message):
    __slots__ = ("num_cached_tokens", "num_transferred_tokens", "kv_bytes", "queue_seconds", "kv_transfer_seconds", "kv_tail_seconds", "hand_over_seconds", "queue_offset_seconds", "pulls")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_TAIL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_transferred_tokens: int
    kv_bytes: int
    queue_seconds: float
    kv_transfer_seconds: float
    kv_tail_seconds: float
    hand_over_seconds: float
    queue_offset_seconds: float
    pulls: _containers.RepeatedCompositeFieldContainer[KvPull]
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_transferred_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., kv_transfer_seconds: _Optional[float] = ..., kv_tail_seconds: _Optional[float] = ..., hand_over_seconds: _Optional[float] = ..., queue_offset_seconds: _Optional[float] = ..., pulls: _Optional[_Iterable[_Union[KvPull, _Mapping]]] = ...) -> None: ...

class KvPull(_message.Message):
    __slots__ = ("bytes", "offset_seconds", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    offset_seconds: float
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., offset_seconds: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "tokens", "finish_reason", "embedding", "first_step", "started")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish_reason: FinishReason
    embedding: bytes
    first_step: DecodeStep
    started: DecodeStarted
    def __init__(self, first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., embedding: _Optional[bytes] = ..., first_step: _Optional[_Union[DecodeStep, _Mapping]] = ..., started: _Optional[_Union[DecodeStarted, _Mapping]] = ...) -> None: ...

class DecodeStep(_message.Message):
    __slots__ = ("offset_seconds", "seconds")
    OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    offset_seconds: float
    seconds: float
    def __init__(self, offset_seconds: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "incarnation", "token_digest", "compatibility")
    class CompatibilityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    incarnation: str
    token_digest: bytes
    compatibility: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., token_digest: _Optional[bytes] = ..., compatibility: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("admitted", "ready", "commit", "finished")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    admitted: KvAdmitted
    ready: KvReady
    commit: KvCommit
    finished: KvFinished
    def __init__(self, admitted: _Optional[_Union[KvAdmitted, _Mapping]] = ..., ready: _Optional[_Union[KvReady, _Mapping]] = ..., commit: _Optional[_Union[KvCommit, _Mapping]] = ..., finished: _Optional[_Union[KvFinished, _Mapping]] = ...) -> None: ...

class KvAdmitted(_message.Message):
    __slots__ = ("block_ids", "block_size")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ("num_ready_blocks",)
    NUM_READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_ready_blocks: int
    def __init__(self, num_ready_blocks: _Optional[int] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("num_tokens", "token_digest", "block_checksums", "first_token")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    token_digest: bytes
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    first_token: Token
    def __init__(self, num_tokens: _Optional[int] = ..., token_digest: _Optional[bytes] = ..., block_checksums: _Optional[_Iterable[int]] = ..., first_token: _Optional[_Union[Token, _Mapping]] = ...) -> None: ...

class KvFinished(_message.Message):
    __slots__ = ("finish_reason",)
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "incarnation", "bytes_read", "transport")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    incarnation: str
    bytes_read: int
    transport: str
    def __init__(self, request_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., bytes_read: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: bool
    def __init__(self, pinned: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("request_id", "incarnation", "block_ids", "spans", "spans_of", "encoding", "row_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SPANS_OF_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    incarnation: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedCompositeFieldContainer[KvSpans]
    spans_of: _containers.RepeatedScalarFieldContainer[int]
    encoding: str
    row_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[_Union[KvSpans, _Mapping]]] = ..., spans_of: _Optional[_Iterable[int]] = ..., encoding: _Optional[str] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class KvSpans(_message.Message):
    __slots__ = ("offsets", "lengths")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class KvPiece(_message.Message):
    __slots__ = ("data", "encoded")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    encoded: bytes
    def __init__(self, data: _Optional[bytes] = ..., encoded: _Optional[bytes] = ...) -> None: ...

class GetRankInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankPullCommand(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: RankPull
    stop: RankPullStop
    def __init__(self, start: _Optional[_Union[RankPull, _Mapping]] = ..., stop: _Optional[_Union[RankPullStop, _Mapping]] = ...) -> None: ...

class RankPull(_message.Message):
    __slots__ = ("request_id", "source", "num_tokens", "first_token", "start", "stop", "remote_ids", "local_ids", "wants_checksums")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REMOTE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_IDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    source: KvSource
    num_tokens: int
    first_token: int
    start: int
    stop: int
    remote_ids: _containers.RepeatedScalarFieldContainer[int]
    local_ids: _containers.RepeatedScalarFieldContainer[int]
    wants_checksums: bool
    def __init__(self, request_id: _Optional[str] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ..., num_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., remote_ids: _Optional[_Iterable[int]] = ..., local_ids: _Optional[_Iterable[int]] = ..., wants_checksums: _Optional[bool] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("worker_id", "block_size", "ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    block_size: int
    ranks: _containers.RepeatedCompositeFieldContainer[KvRankInfo]
    def __init__(self, worker_id: _Optional[str] = ..., block_size: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[KvRankInfo, _Mapping]]] = ...) -> None: ...

class RankPullStop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankPullEvent(_message.Message):
    __slots__ = ("done", "failed", "stopped", "in_doubt", "quiet")
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    done: RankPulled
    failed: RankPullFailed
    stopped: RankPullStopped
    in_doubt: RankPullFailed
    quiet: RankPullQuiet
    def __init__(self, done: _Optional[_Union[RankPulled, _Mapping]] = ..., failed: _Optional[_Union[RankPullFailed, _Mapping]] = ..., stopped: _Optional[_Union[RankPullStopped, _Mapping]] = ..., in_doubt: _Optional[_Union[RankPullFailed, _Mapping]] = ..., quiet: _Optional[_Union[RankPullQuiet, _Mapping]] = ...) -> None: ...

class RankPulled(_message.Message):
    __slots__ = ("num_bytes", "checksums", "carriers")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CARRIERS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    carriers: _containers.RepeatedCompositeFieldContainer[KvCarrier]
    def __init__(self, num_bytes: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., carriers: _Optional[_Iterable[_Union[KvCarrier, _Mapping]]] = ...) -> None: ...

class KvCarrier(_message.Message):
    __slots__ = ("peer_id", "transport", "carrier")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    transport: str
    carrier: str
    def __init__(self, peer_id: _Optional[str] = ..., transport: _Optional[str] = ..., carrier: _Optional[str] = ...) -> None: ...

class RankPullFailed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class RankPullStopped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankPullQuiet(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SourceChecksumsRequest(_message.Message):
    __slots__ = ("block_size", "tensor_parallel_size", "num_tokens", "start", "block_ids")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    tensor_parallel_size: int
    num_tokens: int
    start: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., start: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SourceChecksumsResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankChecksums]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankChecksums, _Mapping]]] = ...) -> None: ...

class RankChecksums(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ...) -> None: ...
