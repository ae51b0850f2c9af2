"""core types <-> protobuf messages. The only place that knows both."""

from typing import Any

from core import types
from core.errors import RequestError
from rpc import worker_pb2 as pb

_ROLES = {
    types.Role.PREFILL: pb.ROLE_PREFILL,
    types.Role.DECODE: pb.ROLE_DECODE,
    types.Role.COLOCATED: pb.ROLE_COLOCATED,
}
_STATES = {
    types.WorkerState.STARTING: pb.WORKER_STATE_STARTING,
    types.WorkerState.READY: pb.WORKER_STATE_READY,
    types.WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
    types.WorkerState.DEAD: pb.WORKER_STATE_DEAD,
}
_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    types.FinishReason.STOP: pb.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_GRAMMARS = {
    types.GrammarKind.JSON_SCHEMA: pb.GRAMMAR_KIND_JSON_SCHEMA,
    types.GrammarKind.JSON_OBJECT: pb.GRAMMAR_KIND_JSON_OBJECT,
    types.GrammarKind.REGEX: pb.GRAMMAR_KIND_REGEX,
    types.GrammarKind.EBNF: pb.GRAMMAR_KIND_EBNF,
}
_POOLINGS = {
    None: pb.POOLING_UNSPECIFIED,
    types.Pooling.MEAN: pb.POOLING_MEAN,
    types.Pooling.LAST: pb.POOLING_LAST,
}
_ROLES_BACK = {value: key for key, value in _ROLES.items()}
_STATES_BACK = {value: key for key, value in _STATES.items()}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}
_GRAMMARS_BACK = {value: key for key, value in _GRAMMARS.items()}
_POOLINGS_BACK = {value: key for key, value in _POOLINGS.items()}


# Of SamplingParams: what has one name and one meaning on both sides.
_ALIKE = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def _alike(sampling: types.SamplingParams | pb.SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in _ALIKE}


def role_to_pb(role: types.Role) -> pb.Role:
    return _ROLES[role]


def role_from_pb(role: pb.Role) -> types.Role:
    return _ROLES_BACK[role]


def state_to_pb(state: types.WorkerState) -> pb.WorkerState:
    return _STATES[state]


def state_from_pb(state: pb.WorkerState) -> types.WorkerState:
    return _STATES_BACK[state]


def finish_to_pb(reason: types.FinishReason | None) -> pb.FinishReason:
    return _FINISH[reason]


def finish_from_pb(reason: pb.FinishReason) -> types.FinishReason | None:
    return _FINISH_BACK[reason]


def request_to_pb(request: types.GenerationRequest) -> pb.GenerationRequest:
    sampling = request.sampling
    message = pb.GenerationRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        cache_salt=request.cache_salt,
        client_request_id=request.client_request_id,
        sampling=pb.SamplingParams(
            **_alike(sampling),
            logit_bias=sampling.logit_bias,
            stop_token_ids=sampling.stop_token_ids,
            pooling=_POOLINGS[sampling.pooling],
        ),
    )
    if sampling.logprobs is not None:
        message.sampling.logprobs = sampling.logprobs
    if sampling.prompt_logprobs is not None:
        message.sampling.prompt_logprobs = sampling.prompt_logprobs
    if sampling.grammar is not None:
        message.sampling.grammar.kind = _GRAMMARS[sampling.grammar.kind]
        message.sampling.grammar.value = sampling.grammar.value
    return message


def request_from_pb(message: pb.GenerationRequest) -> types.GenerationRequest:
    """Raises RequestError for what no router would send."""
    sampling = message.sampling
    if not message.request_id:
        raise RequestError("request_id is empty", param="request_id")
    if not message.prompt_token_ids:
        raise RequestError("the prompt has no tokens", param="prompt_token_ids")
    if sampling.pooling not in _POOLINGS_BACK:
        raise RequestError("the kind of pooling is not known here", param="pooling")
    gives_more = sampling.HasField("prompt_logprobs") or sampling.pooling
    if sampling.max_tokens < 1 and not gives_more:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    return types.GenerationRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        cache_salt=message.cache_salt,
        client_request_id=message.client_request_id,
        sampling=types.SamplingParams(
            **_alike(sampling),
            logit_bias=dict(sampling.logit_bias),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            stop_token_ids=tuple(sampling.stop_token_ids),
            grammar=_grammar_from_pb(sampling),
            prompt_logprobs=(
                sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None
            ),
            pooling=_POOLINGS_BACK[sampling.pooling],
        ),
    )


def _grammar_from_pb(sampling: pb.SamplingParams) -> types.Grammar | None:
    if not sampling.HasField("grammar"):
        return None
    kind = _GRAMMARS_BACK.get(sampling.grammar.kind)
    if kind is None:
        raise RequestError("the grammar's kind is not known here", param="grammar")
    return types.Grammar(kind, sampling.grammar.value)


def token_to_pb(token_id: int, logprobs: types.TokenLogprobs | None) -> pb.Token:
    message = pb.Token(id=token_id)
    if logprobs is not None:
        message.logprob = logprobs.logprob
        message.top.extend(pb.TokenLogprob(id=i, logprob=value) for i, value in logprobs.top)
    return message


def token_from_pb(message: pb.Token) -> tuple[int, types.TokenLogprobs | None]:
    if not message.HasField("logprob"):
        return message.id, None
    top = tuple((entry.id, entry.logprob) for entry in message.top)
    return message.id, types.TokenLogprobs(logprob=message.logprob, top=top)


def prompt_logprobs_to_pb(
    prompt: tuple[int, ...], first_index: int, logprobs: list[types.TokenLogprobs]
) -> pb.PromptLogprobs:
    """Of the tokens of `prompt` from `first_index` on."""
    token_ids = prompt[first_index : first_index + len(logprobs)]
    return pb.PromptLogprobs(
        first_index=first_index,
        tokens=[token_to_pb(i, entry) for i, entry in zip(token_ids, logprobs, strict=True)],
    )


def blocks_to_pb(counts: types.KVBlockCounts) -> pb.KvBlockCounts:
    return pb.KvBlockCounts(
        total=counts.total,
        free=counts.free,
        cached=counts.cached,
        running=counts.running,
        held=counts.held,
        awaiting=counts.awaiting,
    )
