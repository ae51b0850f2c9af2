"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes."""

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from core.errors import RequestError
from router.chat.tools import MAX_TOOLS, parse_tools
from router.http.request_body import read_json
from router.openai.frontend import Frontend
from router.openai.openapi import documented
from router.openai.protocol import MAX_MESSAGES, StrictBody, parse_body

Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]


class TokenizeBody(StrictBody):
    """A prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None  # default: for a prompt, not for messages
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: list[int]


def tokenize_routes(frontend: Frontend, max_body_bytes: int) -> APIRouter:
    router = APIRouter()

    async def read(request: Request) -> dict[str, Any]:
        data = await read_json(request, max_body_bytes)
        if data.get("model") is not None:
            frontend.check_model(data["model"])
        return data

    @router.post("/tokenize", openapi_extra=documented(TokenizeBody, frontend.model_name))
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read(request))
        return await asyncio.to_thread(_tokenize, frontend, body)

    @router.post("/detokenize", openapi_extra=documented(DetokenizeBody, frontend.model_name))
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read(request))
        return await asyncio.to_thread(_detokenize, frontend, body)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What evaluation tools need to build prompts without the model's files."""
        tokenizer = frontend.tokenizer
        template = tokenizer.chat_template
        ends = tokenizer.eos_token_ids

        def text(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_text(token_id)

        return _json(
            {
                "bos_token": text(tokenizer.bos_token_id),
                "eos_token": text(ends[0] if ends else None),
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": frontend.max_model_len_or_none(),
                "chat_template": template.source if template is not None else None,
            }
        )

    return router


def _tokenize(frontend: Frontend, body: TokenizeBody) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("one of prompt and messages is needed", param="prompt")
    tokenizer = frontend.tokenizer
    text, adds_special = body.prompt, True
    if body.messages is not None:
        if tokenizer.chat_template is None:
            raise RequestError("this model has no chat template", param="messages")
        use = parse_tools(body.tools, None)
        text = tokenizer.chat_template.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=list(use.tools) or None,
        )
        adds_special = False
    assert text is not None
    if body.add_special_tokens is not None:
        adds_special = body.add_special_tokens
    tokens = tokenizer.encode(text, add_special_tokens=adds_special)
    return _json(
        {
            "count": len(tokens),
            "max_model_len": frontend.max_model_len_or_none(),
            "tokens": tokens,
            "token_strs": [tokenizer.token_text(i) for i in tokens]
            if body.return_token_strs
            else None,
        }
    )


def _detokenize(frontend: Frontend, body: DetokenizeBody) -> Response:
    tokens = frontend.checked_ids(body.tokens, "tokens") if body.tokens else ()
    return _json({"prompt": frontend.tokenizer.decode(tokens, skip_special_tokens=False)})


def _json(body: dict[str, Any]) -> Response:
    """Written here, in the thread: a long list takes a while."""
    return Response(json.dumps(body), media_type="application/json")
