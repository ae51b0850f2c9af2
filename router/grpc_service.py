"""The public gRPC API: `pdserve.v1.Inference`, with the standard health and reflection services.

A request becomes the same bodies that HTTP takes, so that limits and defaults are the same.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, nullcontext
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import RequestError
from core.types import TokenLogprobs
from router.access.api_keys import KeyStore
from router.access.caller import Caller
from router.access.grpc_keys import authorization_of
from router.chat.output import ChatReader, MessageDelta
from router.openai.format import finish_reason_of
from router.openai.frontend import Frontend
from router.openai.protocol import parse_chat, parse_completion
from router.request.generation import Delta, TextRequest, Usage
from router.request.timeline import Timeline
from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc
from rpc.status import translated_errors

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
# Optional fields of both requests that HTTP has under the same name.
_OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
)
_TOOL_MODES = {
    pb.TOOL_MODE_AUTO: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}
Request = pb.GenerateRequest | pb.ChatRequest
R = TypeVar("R", pb.GenerateResponse, pb.ChatResponse)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers from the same Frontend as HTTP. A call that is cancelled, or past its deadline,
    cancels its sequences."""

    def __init__(self, frontend: Frontend, keys: KeyStore | None = None) -> None:
        self._frontend = frontend
        self._keys = keys

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        run = self._run(request, context, "grpc", self._generate_request, lambda _: _generated)
        async with aclosing(run) as responses:
            async for response in responses:
                yield response

    async def Chat(
        self, request: pb.ChatRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ChatResponse]:
        run = self._run(request, context, "grpc_chat", self._chat_request, _ChatWriter)
        async with aclosing(run) as responses:
            async for response in responses:
                yield response

    async def Models(
        self, request: pb.ModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelsResponse:
        frontend = self._frontend
        length = frontend.max_model_len_or_none() or 0
        model = pb.Model(id=frontend.model_name, max_model_len=length)
        return pb.ModelsResponse(models=[model])

    async def _run(
        self,
        request: Any,
        context: grpc.aio.ServicerContext,
        api: str,
        prepare: Callable[[Any, Caller], Awaitable[TextRequest]],
        writer: Callable[[TextRequest], Callable[[Delta | Usage], R]],
    ) -> AsyncGenerator[R, None]:
        """`writer` makes what turns one request's deltas, and at the end its usage, into
        messages."""
        frontend = self._frontend
        outcome = "cancelled"
        counted = ExitStack()
        try:
            async with translated_errors(context):
                outcome = "error"
                frontend.check_model(request.model)
                caller = self._caller(context)
                counted.enter_context(caller.account.request() if caller.account else nullcontext())
                text_request = await prepare(request, caller)
                outcome = "cancelled"
                write = writer(text_request)
                timeline = Timeline(caller.request_id, api, caller.traceparent)
                generation = frontend.generation(text_request, timeline)
                with frontend.admission.slot(text_request.num_choices):
                    async with aclosing(generation.deltas()) as deltas:
                        async for delta in deltas:
                            yield write(delta)
                yield write(generation.usage)
                outcome = "ok"
        finally:
            counted.close()
            frontend.metrics.count_request(api, outcome)

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        metadata = context.invocation_metadata() or ()
        values = {key: value for key, value in metadata if isinstance(value, str)}
        account = None
        if self._keys is not None:
            account = self._keys.account(authorization_of(metadata))
        return Caller.of(
            values.get("x-request-id", ""),
            values.get("traceparent", ""),
            account,
            values.get("x-session-id", ""),
        )

    async def _generate_request(self, request: pb.GenerateRequest, caller: Caller) -> TextRequest:
        data = _common(request)
        given = request.WhichOneof("input")
        if given == "chat":
            data["messages"] = [_message(message) for message in request.chat.messages]
            if request.HasField("logprobs"):
                data |= {"logprobs": True, "top_logprobs": request.logprobs}
            return await self._frontend.chat(parse_chat(data), caller)
        if given is None:
            raise RequestError("one of prompt, prompt_token_ids and chat is needed", param="prompt")
        is_text = given == "prompt"
        data["prompt"] = request.prompt if is_text else list(request.prompt_token_ids.ids)
        if request.HasField("logprobs"):
            data["logprobs"] = request.logprobs
        return await self._frontend.completion(parse_completion(data), caller)

    async def _chat_request(self, request: pb.ChatRequest, caller: Caller) -> TextRequest:
        data = _common(request)
        data["messages"] = [_message(message) for message in request.messages]
        data["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
        match request.WhichOneof("tool_choice"):
            case "tool_mode" if request.tool_mode:
                mode = _TOOL_MODES.get(request.tool_mode)
                if mode is None:
                    raise RequestError("tool_mode: unknown", param="tool_mode")
                data["tool_choice"] = mode
            case "function":
                named = {"type": "function", "function": {"name": request.function}}
                data["tool_choice"] = named
        if request.HasField("parallel_tool_calls"):
            data["parallel_tool_calls"] = request.parallel_tool_calls
        if request.HasField("enable_thinking"):
            data["chat_template_kwargs"] = {"enable_thinking": request.enable_thinking}
        if request.HasField("logprobs"):
            data |= {"logprobs": True, "top_logprobs": request.logprobs}
        return await self._frontend.chat(parse_chat(data), caller)


def add_public_services(
    server: grpc.aio.Server, frontend: Frontend, keys: KeyStore | None = None
) -> "health.aio.HealthServicer":
    """Adds Inference, health and reflection. The caller sets the health of `SERVICE`."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(frontend, keys), server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    return servicer


def _common(request: Request) -> dict[str, Any]:
    """What both requests have, as the body of an HTTP request."""
    data: dict[str, Any] = {
        name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)
    }
    data |= {
        "model": request.model,
        "stop": list(request.stop),
        "ignore_eos": request.ignore_eos,
        "logit_bias": {str(key): value for key, value in request.logit_bias.items()},
        "min_tokens": request.min_tokens,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "user": request.user,
    }
    if request.HasField("seed"):
        # The body's seed is signed; the same 64 bits either way.
        data["seed"] = request.seed - (1 << 64) if request.seed >> 63 else request.seed
    if structure := _structure(request):
        data["structured_outputs"] = structure
    return data


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if value := getattr(message, name):
            body[name] = value
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _tool(tool: pb.Tool, where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters_json:
        try:
            function["parameters"] = json.loads(tool.parameters_json)
        except (ValueError, RecursionError) as error:
            at = f"{where}.parameters_json"
            raise RequestError(f"{at}: not JSON: {error}", param=at) from None
    return {"type": "function", "function": function}


def _structure(request: Request) -> dict[str, Any] | None:
    """As in the body's structured_outputs."""
    match request.WhichOneof("structure"):
        case "json_schema":
            return {"json": request.json_schema}
        case "json_object":
            return {"json_object": request.json_object}
        case "regex":
            return {"regex": request.regex}
        case "ebnf":
            return {"grammar": request.ebnf}
        case "choice":
            return {"choice": list(request.choice.texts)}
    return None


def _generated(said: Delta | Usage) -> pb.GenerateResponse:
    if isinstance(said, Usage):
        return pb.GenerateResponse(usage=_usage(said))
    return pb.GenerateResponse(
        index=said.index,
        text=said.text,
        token_ids=said.token_ids,
        finish_reason=said.finish_reason or "",
        logprobs=_logprobs(said),
    )


class _ChatWriter:
    """Takes the choices of one chat apart."""

    def __init__(self, request: TextRequest) -> None:
        self._readers = None
        if request.reading is not None:
            self._readers = [ChatReader(request.reading) for _ in range(request.num_choices)]

    def __call__(self, said: Delta | Usage) -> pb.ChatResponse:
        if isinstance(said, Usage):
            return pb.ChatResponse(usage=_usage(said))
        reason = said.finish_reason
        if self._readers is None:
            message = MessageDelta(content=said.text)
        else:
            reader = self._readers[said.index]
            message = reader.feed(said.text, is_last=reason is not None)
            reason = finish_reason_of(reason, reader)
        return pb.ChatResponse(
            index=said.index,
            content=message.content,
            reasoning_content=message.reasoning,
            tool_calls=[
                pb.ToolCallDelta(
                    index=call.index,
                    id=call.id or "",
                    name=call.name or "",
                    arguments=call.arguments,
                )
                for call in message.calls
            ],
            token_ids=said.token_ids,
            finish_reason=reason or "",
            logprobs=_logprobs(said),
        )


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _logprobs(delta: Delta) -> list[pb.TokenLogprob]:
    pairs = zip(delta.token_ids, delta.logprobs or (), strict=False)
    return [_logprob(token_id, entry) for token_id, entry in pairs]


def _logprob(token_id: int, entry: TokenLogprobs) -> pb.TokenLogprob:
    top = [pb.TokenLogprob(id=i, logprob=value) for i, value in entry.top]
    return pb.TokenLogprob(id=token_id, logprob=entry.logprob, top=top)
