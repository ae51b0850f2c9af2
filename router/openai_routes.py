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
from router.openapi import documented
from router.request_body import read_json
from router.responses import GuardedResponse, event_stream, whole
from router.timeline import Timeline
from router.timeline_view import timeline_view

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
        caller = request.state.caller
        timeline = Timeline(caller.request_id, api, caller.traceparent)
        try:
            data = await read_json(request, max_body_bytes)
            frontend.check_model(data.get("model"))
            body, text_request = await prepare(data, request.state.caller)
        except PdserveError as error:
            count("refused")
            frontend.metrics.count_rejection(error)
            raise
        timeline.note_tokenized()
        formatter = make_formatter(
            shape, body, text_request, frontend.model_name, frontend.tokenizer
        )
        timeline.response_id = formatter.response_id
        generation = frontend.generation(text_request, timeline)
        timed = bool(body.timings)
        if body.stream:
            work = event_stream(lambda: _events(frontend, generation, formatter, timed))
        else:
            work = whole(lambda: _collected(frontend, generation, formatter, timed))
        return GuardedResponse(work, count)

    @router.post("/completions", openapi_extra=documented(CompletionBody, frontend.model_name))
    async def completions(request: Request) -> Response:
        return await generate(request, "completions", COMPLETION, prepare_completion)

    @router.post("/chat/completions", openapi_extra=documented(ChatBody, frontend.model_name))
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
    frontend: Frontend, generation: Generation, formatter: Formatter, timed: bool
) -> AsyncGenerator[bytes, None]:
    with frontend.admission.slot(generation.request.num_choices):
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                yield formatter.chunk(delta)
        timings = timeline_view(generation.timeline) if timed else None
        yield formatter.last_chunk(generation.usage, timings)
        yield DONE


async def _collected(
    frontend: Frontend, generation: Generation, formatter: Formatter, timed: bool
) -> dict[str, Any]:
    by_choice: list[list[Delta]] = [[] for _ in range(generation.request.num_choices)]
    with frontend.admission.slot(len(by_choice)):
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                by_choice[delta.index].append(delta)
    timings = timeline_view(generation.timeline) if timed else None
    return formatter.whole(by_choice, generation.usage, timings)
