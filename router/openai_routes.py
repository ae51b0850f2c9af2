"""The OpenAI-compatible HTTP routes."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from time import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from core.errors import PdserveError
from router.caller import Caller
from router.frontend import Body, Frontend
from router.generation import Delta, Generation, TextRequest
from router.openai_format import CHAT, COMPLETION, DONE, Formatter, Shape, make_formatter
from router.openai_protocol import ChatBody, CompletionBody, parse_chat, parse_completion
from router.request_body import read_json
from router.responses import GuardedResponse, event_stream, whole

Prepare = Callable[[dict[str, Any], Caller], Awaitable[tuple[Body, TextRequest]]]


def openai_routes(frontend: Frontend, max_body_bytes: int) -> APIRouter:
    """`/v1/...`, answered by `frontend`."""
    router = APIRouter(prefix="/v1")
    started = int(time())

    async def prepare_completion(data: dict[str, Any], caller: Caller) -> tuple[Body, TextRequest]:
        body = parse_completion(data)
        return body, await frontend.completion(body, caller)

    async def prepare_chat(data: dict[str, Any], caller: Caller) -> tuple[Body, TextRequest]:
        body = parse_chat(data)
        return body, await frontend.chat(body, caller)

    async def generate(request: Request, api: str, shape: Shape, prepare: Prepare) -> Response:
        count = partial(frontend.metrics.count_request, api)
        try:
            data = await read_json(request, max_body_bytes)
            frontend.check_model(data.get("model"))
            body, text_request = await prepare(data, request.state.caller)
        except PdserveError:
            count("refused")
            raise
        formatter = make_formatter(
            shape, body, text_request, frontend.model_name, frontend.tokenizer
        )
        generation = frontend.generation(text_request)
        if body.stream:
            work = event_stream(lambda: _events(frontend, generation, formatter))
        else:
            work = whole(lambda: _collected(frontend, generation, formatter))
        return GuardedResponse(work, count)

    @router.post("/completions", openapi_extra=_documented(CompletionBody))
    async def completions(request: Request) -> Response:
        return await generate(request, "completions", COMPLETION, prepare_completion)

    @router.post("/chat/completions", openapi_extra=_documented(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await generate(request, "chat", CHAT, prepare_chat)

    def model_card() -> dict[str, Any]:
        return {
            "id": frontend.model_name,
            "object": "model",
            "created": started,
            "owned_by": "pdserve",
            "max_model_len": frontend.max_model_len_or_none(),
        }

    @router.get("/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model_card()]})

    @router.get("/models/{model_id:path}")
    async def model(model_id: str) -> JSONResponse:
        frontend.check_model(model_id)
        return JSONResponse(model_card())

    return router


async def _events(
    frontend: Frontend, generation: Generation, formatter: Formatter
) -> AsyncGenerator[bytes, None]:
    with frontend.admission.slot(generation.request.num_choices):
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                yield formatter.chunk(delta)
        yield formatter.usage_chunk(generation.usage)
        yield DONE


async def _collected(
    frontend: Frontend, generation: Generation, formatter: Formatter
) -> dict[str, Any]:
    by_choice: list[list[Delta]] = [[] for _ in range(generation.request.num_choices)]
    with frontend.admission.slot(len(by_choice)):
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                by_choice[delta.index].append(delta)
    return formatter.whole(by_choice, generation.usage)


def _documented(kind: type[Body]) -> dict[str, Any]:
    """The request body's schema for the OpenAPI document; the body itself is read by hand."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema["properties"]["stream_options"] = {
        "anyOf": [
            {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
            {"type": "null"},
        ]
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
