"""From request bodies to TextRequests: tokenizes, resolves defaults, checks against the model.

Everything that can be wrong with a request is found here, before a worker hears of it.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from core.errors import NotFoundError, RequestError, UnavailableError
from core.types import SamplingParams
from router.access.caller import Caller
from router.chat.structured_output import grammar_of
from router.chat.tools import ChatReading, parse_tools
from router.openai.protocol import MAX_CHOICES, ChatBody, CompletionBody
from router.placement.registry import Registry
from router.request.admission import Admission
from router.request.generation import SEED_MASK, Generation, TextRequest
from router.request.metrics import Metrics
from router.request.pipeline import Pipeline
from router.request.timeline import Timeline, Timelines
from router.text.tokenizer import Tokenizer

# Text longer than this that was not seen lately is tokenized in a thread, so that other streams go
# on meanwhile.
_INLINE_CHARS = 4096
# Below this the sampler would only divide by almost nothing: the best token wins anyway.
_GREEDY_BELOW = 1e-5
_TINY_TOP_P = 1e-9

T = TypeVar("T")
Body = CompletionBody | ChatBody


@dataclass(frozen=True, slots=True)
class Frontend:
    """What HTTP and gRPC share."""

    model_name: str
    tokenizer: Tokenizer
    registry: Registry
    pipeline: Pipeline
    admission: Admission
    metrics: Metrics
    block_size: int
    reading: ChatReading = ChatReading()
    timelines: Timelines = field(default_factory=Timelines)

    def generation(self, request: TextRequest, timeline: Timeline | None = None) -> Generation:
        """`timeline`: begun when the request arrived; without, it begins here."""
        return Generation(
            request,
            self.tokenizer,
            self.pipeline,
            self.metrics,
            self.block_size,
            self.timelines,
            timeline or Timeline(request.caller.request_id, "grpc", request.caller.traceparent),
        )

    def max_model_len_or_none(self) -> int | None:
        """None as long as no worker is ready."""
        try:
            return self.registry.max_model_len()
        except UnavailableError:
            return None

    def check_model(self, name: Any) -> None:
        """Raises NotFoundError unless `name` is the served model's."""
        if name is not None and not isinstance(name, str):
            raise RequestError("model: expected a string", param="model")
        if not name:
            raise NotFoundError(
                f"you must name a model; this router serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
        if name != self.model_name:
            raise NotFoundError(
                f"the model {name[:200]!r} does not exist; this router serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def completion(self, body: CompletionBody, caller: Caller) -> TextRequest:
        prompts = split_prompt(body.prompt)
        if len(prompts) * (body.n or 1) > MAX_CHOICES:
            raise RequestError(f"prompts times n must be at most {MAX_CHOICES}", param="n")
        salt = body.cache_salt or ""
        token_ids = tuple([await self.tokens_of(prompt, "prompt", salt) for prompt in prompts])
        request = self._request(body, token_ids, caller)
        return replace(request, echo=bool(body.echo))

    async def tokens_of(
        self, prompt: str | list[Any], param: str, cache_salt: str = ""
    ) -> tuple[int, ...]:
        """A text tokenized, or token ids checked. Raises RequestError."""
        if isinstance(prompt, str):
            return await self._encode(prompt, cache_salt, add_special_tokens=True, param=param)
        return self.checked_ids(prompt, param)

    async def chat(self, body: ChatBody, caller: Caller) -> TextRequest:
        template = self.tokenizer.chat_template
        if template is None:
            raise RequestError("this model has no chat template: use /v1/completions")

        use = parse_tools(body.tools, body.tool_choice)
        self.reading.check(use, template)

        kwargs = body.chat_template_kwargs
        switches = kwargs.model_dump(exclude_none=True) if kwargs is not None else None

        def render() -> str:
            return template.render(body.messages, tools=list(use.tools) or None, switches=switches)

        size = sum(len(str(part)) for message in body.messages for part in message.values())
        size += len(str(use.tools))
        text = await _offload(size, render)
        prompt = await self._encode(text, body.cache_salt or "", add_special_tokens=False)
        request = self._request(body, (prompt,), caller)
        parallel = body.parallel_tool_calls is not False
        plan = self.reading.plan(use, text, parallel)
        if plan is None:
            return request
        if use.is_forced:
            if request.sampling.grammar is not None:
                raise RequestError(
                    "tool_choice: a forced call leaves no room for another format of the answer",
                    param="tool_choice",
                )
            forced = replace(request.sampling, grammar=use.grammar(parallel))
            request = replace(request, sampling=forced)
        return replace(
            request, reading=plan, shown_special=self.tokenizer.added_token_ids(plan.markers)
        )

    async def _encode(
        self, text: str, cache_salt: str, *, add_special_tokens: bool, param: str = "prompt"
    ) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special_tokens, cache_salt))

        size = self.tokenizer.num_new_characters(text, cache_salt)
        token_ids = await _offload(size, encode)
        if not token_ids:
            raise RequestError(f"the {param} is empty", param=param)
        return token_ids

    def checked_ids(self, ids: list[Any], param: str) -> tuple[int, ...]:
        """Token ids as they came. Raises RequestError unless each is in the vocabulary."""
        if not ids:
            raise RequestError(f"the {param} is empty", param=param)
        vocab_size = self.tokenizer.vocab_size
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{param}: {str(token_id)[:40]!r} is not a token id of this model "
                    f"(0 to {vocab_size - 1})",
                    param=param,
                )
        return tuple(ids)

    def _request(
        self, body: Body, prompts: tuple[tuple[int, ...], ...], caller: Caller
    ) -> TextRequest:
        longest = max(map(len, prompts))
        skip = body.skip_special_tokens
        return TextRequest(
            prompts=prompts,
            sampling=self._sampling(body, longest),
            n=body.n or 1,
            stop=body.stops,
            skip_special_tokens=True if skip is None else skip,
            cache_salt=body.cache_salt or "",
            caller=replace(caller, user=body.user or "", priority=body.priority or 0),
        )

    def _sampling(self, body: Body, num_prompt_tokens: int) -> SamplingParams:
        max_tokens = self._max_tokens(body, num_prompt_tokens)
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"min_tokens is larger than max_tokens ({max_tokens})", param="min_tokens"
            )
        temperature = _or(body.temperature, 1.0)
        stop_token_ids = list(
            self.checked_ids(body.stop_token_ids, "stop_token_ids") if body.stop_token_ids else ()
        )
        if not body.ignore_eos:
            stop_token_ids += self.tokenizer.eos_token_ids
        seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=max(0, body.top_k or 0),
            top_p=max(_TINY_TOP_P, _or(body.top_p, 1.0)),
            min_p=_or(body.min_p, 0.0),
            seed=seed,
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(body.logit_bias or {}),
            logprobs=body.num_logprobs,
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            grammar=grammar_of(body),
            prompt_logprobs=(
                body.num_prompt_logprobs if isinstance(body, CompletionBody) else None
            ),
        )

    def _max_tokens(self, body: Body, num_prompt_tokens: int) -> int:
        limit = self.registry.max_model_len()
        room = limit - num_prompt_tokens
        if room < (body.wanted_tokens != 0):
            raise RequestError(
                f"this model's context is {limit} tokens, prompt and output together; the prompt "
                f"alone has {num_prompt_tokens}",
                param=_input_field(body),
                code="context_length_exceeded",
            )
        if body.wanted_tokens is None:
            return min(room, body.default_max_tokens or room)
        if body.wanted_tokens > room:
            raise RequestError(
                f"this model's context is {limit} tokens; the prompt has {num_prompt_tokens} and "
                f"{body.wanted_tokens} are asked for, which is {body.wanted_tokens - room} too "
                "many",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return body.wanted_tokens

    def _logit_bias(self, bias: dict[str, float]) -> dict[int, float]:
        checked = {}
        for key, value in bias.items():
            # Plain decimal digits: `int` also takes signs, spaces and other scripts.
            is_id = key.isascii() and key.isdigit() and len(key) <= 10
            if not is_id or int(key) >= self.tokenizer.vocab_size:
                raise RequestError(
                    f"logit_bias: {key[:40]!r} is not a token id of this model", param="logit_bias"
                )
            if not -100 <= value <= 100:
                raise RequestError("logit_bias: values go from -100 to 100", param="logit_bias")
            checked[int(key)] = value
        return checked


def split_prompt(prompt: Any, param: str = "prompt") -> list[str | list[Any]]:
    """One entry for each prompt, text or token ids. Raises RequestError."""
    wrong = RequestError(f"{param}: expected text, token ids, or a list of them", param=param)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise wrong
    if not prompt:
        raise RequestError(f"the {param} is empty", param=param)
    if all(type(item) is int for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) for item in prompt):
        return prompt
    raise wrong


def _input_field(body: Body) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


async def _offload(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _INLINE_CHARS else work()
