"""The public gRPC API: `pdserve.v1.Inference`, with the standard health and reflection services.

A request becomes the same bodies that HTTP takes, so that limits and defaults are the same.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, nullcontext
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import RequestError
from core.types import TokenLogprobs
from router.api_keys import KeyStore
from router.caller import Caller
from router.frontend import Frontend
from router.generation import Delta, TextRequest
from router.grpc_keys import authorization_of
from router.openai_protocol import parse_chat, parse_completion
from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc
from rpc.status import translated_errors

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
# Optional fields of GenerateRequest that HTTP has under the same name.
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


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers from the same Frontend as HTTP. A cancelled call cancels its sequences."""

    def __init__(self, frontend: Frontend, keys: KeyStore | None = None) -> None:
        self._frontend = frontend
        self._keys = keys

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        frontend = self._frontend
        outcome = "cancelled"
        counted = ExitStack()
        try:
            async with translated_errors(context):
                outcome = "error"
                frontend.check_model(request.model)
                caller = self._caller(context)
                counted.enter_context(caller.account.request() if caller.account else nullcontext())
                text_request = await self._text_request(request, caller)
                outcome = "cancelled"
                generation = frontend.generation(text_request)
                with frontend.admission.slot(text_request.num_choices):
                    async with aclosing(generation.deltas()) as deltas:
                        async for delta in deltas:
                            yield _response(delta)
                usage = generation.usage
                yield pb.GenerateResponse(
                    usage=pb.Usage(
                        prompt_tokens=usage.prompt_tokens,
                        completion_tokens=usage.completion_tokens,
                        cached_tokens=usage.cached_tokens,
                    )
                )
                outcome = "ok"
        finally:
            counted.close()
            frontend.metrics.count_request("grpc", outcome)

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        metadata = context.invocation_metadata() or ()
        values = {key: value for key, value in metadata if isinstance(value, str)}
        account = None
        if self._keys is not None:
            account = self._keys.account(authorization_of(metadata))
        return Caller.of(values.get("x-request-id", ""), values.get("traceparent", ""), account)

    async def Models(
        self, request: pb.ModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelsResponse:
        frontend = self._frontend
        length = frontend.max_model_len_or_none() or 0
        model = pb.Model(id=frontend.model_name, max_model_len=length)
        return pb.ModelsResponse(models=[model])

    async def _text_request(self, request: pb.GenerateRequest, caller: Caller) -> TextRequest:
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
        }
        if request.HasField("seed"):
            # The body's seed is signed; the same 64 bits either way.
            data["seed"] = request.seed - (1 << 64) if request.seed >> 63 else request.seed
        if structure := _structure(request):
            data["structured_outputs"] = structure
        given = request.WhichOneof("input")
        if given == "chat":
            data["messages"] = [
                {"role": message.role, "content": message.content}
                for message in request.chat.messages
            ]
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


def _structure(request: pb.GenerateRequest) -> dict[str, Any] | None:
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


def _response(delta: Delta) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason or "",
        logprobs=[
            _logprob(token_id, entry)
            for token_id, entry in zip(delta.token_ids, delta.logprobs or (), strict=False)
        ],
    )


def _logprob(token_id: int, entry: TokenLogprobs) -> pb.TokenLogprob:
    top = [pb.TokenLogprob(id=i, logprob=value) for i, value in entry.top]
    return pb.TokenLogprob(id=token_id, logprob=entry.logprob, top=top)
