"""`POST /v1/embeddings`: prompts as vectors of length one, from the served model's own states.

A prompt to embed takes the way of a generation that samples nothing: placed, retried and cancelled
like one, computed in chunks by a prefill worker (a colocated one where there is no other).
"""

import asyncio
import base64
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from core.block_hash import block_hashes
from core.config import RouterConfig
from core.errors import EngineError, NotFoundError, PdserveError, RequestError
from core.types import Pooling, SamplingParams
from router.access.caller import Caller
from router.http.request_body import read_json
from router.http.responses import GuardedResponse, whole
from router.openai.frontend import Frontend, split_prompt
from router.openai.openapi import documented
from router.openai.protocol import (
    Neutral,
    Priority,
    Prompts,
    Salt,
    Short,
    StrictBody,
    parse_known,
)
from router.request.generation import Usage
from router.request.pipeline import SequenceRequest, SequenceStats

MAX_INPUTS = 2048  # as OpenAI
# Of one request at once on the workers; the others wait here.
_AT_ONCE = 16
# What is known and not implemented: the values that ask for nothing.
_NEUTRAL: Neutral = {
    "add_special_tokens": (True,),
    "dimensions": (),
    "truncate_prompt_tokens": (),
}


class EmbeddingBody(StrictBody):
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    user: Short | None = None
    # As in a completion.
    cache_salt: Salt | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """The prompts of one request, checked."""

    prompts: tuple[tuple[int, ...], ...]
    pooling: Pooling
    cache_salt: str
    caller: Caller


def embedding_routes(frontend: Frontend, config: RouterConfig) -> APIRouter:
    router = APIRouter(prefix="/v1")
    pooling = Pooling(config.embeddings) if config.embeddings is not None else None

    async def prepare(data: dict[str, Any], caller: Caller) -> tuple[EmbeddingBody, _Job]:
        if pooling is None:
            raise NotFoundError(
                "this deployment serves no embeddings (router.embeddings: mean or last)",
                code="embeddings_not_served",
            )
        frontend.check_model(data.get("model"))
        body = parse_known(EmbeddingBody, data, _NEUTRAL)
        inputs = split_prompt(body.input, "input")
        if len(inputs) > MAX_INPUTS:
            raise RequestError(f"input: at most {MAX_INPUTS} at once", param="input")
        prompts = tuple(
            [await frontend.tokens_of(text, "input", body.cache_salt or "") for text in inputs]
        )
        limit, longest = frontend.registry.max_model_len(), max(map(len, prompts))
        if longest > limit:
            raise RequestError(
                f"this model's context is {limit} tokens; an input has {longest}",
                param="input",
                code="context_length_exceeded",
            )
        caller = replace(caller, user=body.user or "", priority=body.priority or 0)
        return body, _Job(prompts, pooling, body.cache_salt or "", caller)

    @router.post("/embeddings", openapi_extra=documented(EmbeddingBody, frontend.model_name))
    async def embeddings(request: Request) -> Response:
        count = partial(frontend.metrics.count_request, "embeddings")
        try:
            data = await read_json(request, config.max_body_bytes)
            body, job = await prepare(data, request.state.caller)
        except PdserveError as error:
            count("refused")
            frontend.metrics.count_rejection(error)
            raise

        async def answer() -> Response:
            vectors, usage = await _embed(frontend, job)
            is_base64 = body.encoding_format == "base64"
            # Written in a thread: many vectors are megabytes of numbers.
            return await asyncio.to_thread(_body, vectors, usage, frontend.model_name, is_base64)

        return GuardedResponse(whole(answer), count)

    return router


async def _embed(frontend: Frontend, job: _Job) -> tuple[list[bytes], Usage]:
    """A vector for each prompt, in order. The first that fails ends them all, and so does a
    client that leaves. Raises PdserveError."""
    vectors = [b""] * len(job.prompts)
    usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
    rest = iter(enumerate(job.prompts))

    async def work() -> None:
        for index, prompt in rest:
            stats = SequenceStats()
            vectors[index] = await _vector(frontend, job, prompt, stats)
            usage.cached_tokens += stats.num_cached_tokens or 0

    num_at_once = min(_AT_ONCE, len(job.prompts))
    with frontend.admission.slot(num_at_once):
        tasks = [asyncio.create_task(work()) for _ in range(num_at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            frontend.metrics.count_usage(usage.prompt_tokens, usage.cached_tokens, 0)
            if job.caller.account is not None:
                job.caller.account.spend_tokens(usage.prompt_tokens)
    return vectors, usage


async def _vector(
    frontend: Frontend, job: _Job, prompt: tuple[int, ...], stats: SequenceStats
) -> bytes:
    hashes: Sequence[bytes] = ()
    if job.pooling is Pooling.LAST:  # a mean is never served by a prefix cache
        hashes = block_hashes(prompt[:-1], frontend.block_size, job.cache_salt)
    sequence = SequenceRequest(
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=0, pooling=job.pooling),
        hashes=hashes,
        cache_salt=job.cache_salt,
        caller=job.caller,
    )
    async with aclosing(frontend.pipeline.generate(sequence, stats)) as batches:
        async for batch in batches:
            if batch.embedding:
                return batch.embedding
    raise EngineError("a worker ended a prompt without its embedding")


def _body(vectors: list[bytes], usage: Usage, model: str, is_base64: bool) -> Response:
    data = []
    for index, raw in enumerate(vectors):
        vector = np.frombuffer(raw, "<f4")
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        embedding: Any = vector.astype("<f4")
        if is_base64:
            embedding = base64.b64encode(embedding.tobytes()).decode()
        else:
            embedding = embedding.tolist()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    total = usage.prompt_tokens
    body = {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }
    return Response(json.dumps(body), media_type="application/json")
