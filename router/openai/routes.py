"""The OpenAI-compatible HTTP routes."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Any, Protocol

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from core.errors import PdserveError, RequestError
from router.access.caller import Caller
from router.direct import Direct
from router.http.request_body import read_json
from router.http.responses import GuardedResponse, event_stream, whole
from router.openai.format import CHAT, COMPLETION, Shape, make_formatter
from router.openai.frontend import Body, Frontend
from router.openai.openapi import documented
from router.openai.protocol import ChatBody, CompletionBody, parse_chat, parse_completion
from router.openai.response_body import (
    ResponseBody,
    chat_of,
    in_response_names,
    parse_response,
)
from router.openai.response_format import ResponseFormatter
from router.request.generation import Delta, Generation, TextRequest, Usage
from router.request.timeline import Timeline
from router.request.timeline_view import timeline_view


class Writer(Protocol):
    """Makes a response of deltas, in events by `chunk` and `last_chunk`, or `whole`."""

    @property
    def response_id(self) -> str: ...
    def chunk(self, delta: Delta) -> bytes: ...
    def last_chunk(self, usage: Usage, timings: dict[str, Any] | None) -> bytes: ...
    def failure(self, error: PdserveError) -> bytes: ...
    def whole(
        self, deltas: Sequence[Sequence[Delta]], usage: Usage, timings: dict[str, Any] | None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to run, and how its answer is written."""

    request: TextRequest
    writer: Writer
    streams: bool
    timed: bool  # its timeline goes along


Prepare = Callable[[dict[str, Any], Caller], Awaitable[Prepared]]


def openai_routes(frontend: Frontend, max_body_bytes: int) -> APIRouter:
    """`/v1/...`, answered by `frontend`."""
    router = APIRouter(prefix="/v1")
    started = int(time())

    def prepared(shape: Shape, body: Body, request: TextRequest) -> Prepared:
        writer = make_formatter(shape, body, request, frontend.model_name, frontend.tokenizer)
        return Prepared(request, writer, bool(body.stream), bool(body.timings))

    async def prepare_completion(data: dict[str, Any], caller: Caller) -> Prepared:
        body = parse_completion(data)
        return prepared(COMPLETION, body, await frontend.completion(body, caller))

    async def prepare_chat(data: dict[str, Any], caller: Caller) -> Prepared:
        body = parse_chat(data)
        return prepared(CHAT, body, await frontend.chat(body, caller))

    async def prepare_response(data: dict[str, Any], caller: Caller) -> Prepared:
        body = parse_response(data)
        chat = chat_of(body)
        try:
            request = await frontend.chat(chat, caller)
        except RequestError as error:
            raise in_response_names(error) from None
        writer = ResponseFormatter(body, request, frontend.model_name, frontend.tokenizer)
        return Prepared(request, writer, bool(body.stream), bool(body.timings))

    async def generate(request: Request, api: str, prepare: Prepare) -> Response:
        count = partial(frontend.metrics.count_request, api)
        caller = request.state.caller
        timeline = Timeline(caller.request_id, api, caller.traceparent)
        try:
            data = await read_json(request, max_body_bytes)
            frontend.check_model(data.get("model"))
            ready = await prepare(data, caller)
        except PdserveError as error:
            count("refused")
            frontend.metrics.count_rejection(error)
            raise
        timeline.note_tokenized()
        timeline.response_id = ready.writer.response_id
        generation = frontend.generation(ready.request, timeline)
        if ready.streams:
            events = partial(_events, frontend, generation, ready)
            work = event_stream(events, ready.writer.failure)
        else:
            work = whole(lambda: _collected(frontend, generation, ready))
        return GuardedResponse(work, count)

    @router.post("/completions", openapi_extra=documented(CompletionBody, frontend.model_name))
    async def completions(request: Request) -> Response:
        return await generate(request, "completions", prepare_completion)

    @router.post("/chat/completions", openapi_extra=documented(ChatBody, frontend.model_name))
    async def chat_completions(request: Request) -> Response:
        return await generate(request, "chat", prepare_chat)

    @router.post("/responses", openapi_extra=documented(ResponseBody, frontend.model_name))
    async def responses(request: Request) -> Response:
        return await generate(request, "responses", prepare_response)

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
    frontend: Frontend, generation: Generation, ready: Prepared, direct: Direct[bytes]
) -> AsyncGenerator[bytes, None]:
    chunk = ready.writer.chunk
    with frontend.admission.slot(generation.request.num_choices):
        async with aclosing(generation.deltas(direct.after(chunk))) as deltas:
            async for delta in deltas:
                yield chunk(delta)
        timings = timeline_view(generation.timeline) if ready.timed else None
        yield ready.writer.last_chunk(generation.usage, timings)


async def _collected(frontend: Frontend, generation: Generation, ready: Prepared) -> dict[str, Any]:
    by_choice: list[list[Delta]] = [[] for _ in range(generation.request.num_choices)]
    with frontend.admission.slot(len(by_choice)):
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                by_choice[delta.index].append(delta)
    timings = timeline_view(generation.timeline) if ready.timed else None
    return ready.writer.whole(by_choice, generation.usage, timings)
