"""The OpenAI request bodies: which fields there are, and what may be in them.

A field is implemented, or refused by name: either as known but unsupported (unless its value asks
for nothing), or as unrecognized. vLLM's well-known extras go by their names.

| field | accepted | remark |
|---|---|---|
| max_tokens | 1 .. context - prompt | default 16, for chats the rest; 0 with a scored prompt |
| echo, prompt_logprobs | completions; 0 .. 20 | echo with logprobs scores the prompt too |
| response_format, structured_outputs, guided_* | router.chat.structured_output | |
| temperature | 0 .. 2 | 0 is greedy, whatever the filters say |
| top_p | 0 .. 1 | 0 keeps the best token alone |
| top_k | -1, 0 (both off), 1 .. | |
| min_p | 0 .. 1 | |
| n | 1 .. 128, with the number of prompts | |
| seed | -2^63 .. 2^63-1 | choice i draws with seed + i |
| stop | up to 4 strings of 1 .. 1024 characters | |
| logprobs | 0 .. 20 (chats: boolean, top_logprobs 0 .. 20) | |
| presence_penalty, frequency_penalty | -2 .. 2 | |
| repetition_penalty | 0.01 .. 10 | far less would make logits infinite |
| logit_bias | token id -> -100 .. 100, up to 1024 | |
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import RequestError
from router.chat.tools import MAX_TOOLS

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4096

Unit = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Short = Annotated[str, Field(max_length=512)]
Salt = Annotated[str, Field(max_length=256)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]

Neutral = Mapping[str, tuple[Any, ...]]
# Parameters of OpenAI and vLLM that are not implemented: the values that ask for nothing.
_NEUTRAL: Neutral = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),  # of chats
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),  # of chats
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


B = TypeVar("B", bound=StrictBody)


class StreamOptions(StrictBody):
    include_usage: bool | None = None


class TemplateSwitches(StrictBody):
    """What a client may tell the model's chat template. Names as the templates have them."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class GenerationBody(StrictBody):
    """What both kinds of request have. `None` is the default everywhere, as OpenAI has it."""

    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    user: Short | None = None
    prompt_cache_key: Short | None = None
    safety_identifier: Short | None = None
    # vLLM
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Priority | None = None  # lower goes first
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # pdserve: adds the request's timeline to the answer.
    timings: bool | None = None
    cache_salt: Salt | None = None
    # Checked by router.chat.structured_output.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


# Text, token ids, or a list of either. Checked by hand: a list may have 100k numbers.
Prompts = Annotated[
    Any,
    Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens. Without an output there is always a score."""
        wanted = [self.logprobs if self.echo else None, self.prompt_logprobs]
        wanted += [0] if self.max_tokens == 0 else []
        return max((count for count in wanted if count is not None), default=None)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report for each token; None: no logprobs."""
        return self.logprobs


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`. The messages' own fields are checked where they are rendered."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Checked by router.chat.tools.
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        limits = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        return min(limits, default=None)


def parse_completion(data: dict[str, Any]) -> CompletionBody:
    """Raises RequestError that names the field."""
    body = _parse(CompletionBody, data)
    assert isinstance(body, CompletionBody)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError("max_tokens of 0 needs echo or prompt_logprobs", param="max_tokens")
    return body


def parse_chat(data: dict[str, Any]) -> ChatBody:
    """Raises RequestError that names the field."""
    body = _parse(ChatBody, data)
    assert isinstance(body, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return body


def parse_body(kind: type[B], data: dict[str, Any]) -> B:
    """Raises RequestError that names the field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _as_request_error(error) from None


def parse_known(kind: type[B], data: dict[str, Any], neutral: Neutral) -> B:
    """As `parse_body`. `neutral` has the fields that are known and not implemented, with the
    values that ask for nothing. Raises RequestError that names the field."""
    known = {}
    for name, value in data.items():
        if name in kind.model_fields or name not in neutral:
            known[name] = value
        elif value is not None and not _asks_for_nothing(value, neutral[name]):
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    return parse_body(kind, known)


def _parse(kind: type[GenerationBody], data: dict[str, Any]) -> GenerationBody:
    body = parse_known(kind, data, _NEUTRAL)
    _check_stop(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.min_tokens and body.wanted_tokens and body.min_tokens > body.wanted_tokens:
        raise RequestError("min_tokens is larger than max_tokens", param="min_tokens")
    return body


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, but not in JSON.
    return any(type(value) is type(nothing) and value == nothing for nothing in neutral)


def _check_stop(body: GenerationBody) -> None:
    if len(body.stops) > MAX_STOPS:
        raise RequestError(f"stop: at most {MAX_STOPS} strings", param="stop")
    for stop in body.stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop: each string needs 1 to {MAX_STOP_CHARS} characters", param="stop"
            )


def _as_request_error(error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in problem["loc"]]
    param = path[0] if path else None
    if problem["type"] == "extra_forbidden":
        name = ".".join(path)
        return RequestError(
            f"Unrecognized request argument supplied: {name}",
            param=name,
            code="unrecognized_parameter",
        )
    if problem["type"] == "missing":
        name = ".".join(path)
        return RequestError(
            f"{name}: missing, a value is required", param=name, code="missing_required_parameter"
        )
    got = repr(problem["input"])
    shown = got if len(got) <= 80 else f"{got[:77]}..."
    return RequestError(f"{param}: {problem['msg']}, got {shown}", param=param)
