"""OpenAI's response bodies, whole and in chunks.

Chunks are built by hand around what never changes in one response: a stream of a thousand tokens
should not validate a thousand models.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from core.errors import PdserveError
from core.types import TokenLogprobs
from router.chat.output import ChatReader, MessageDelta
from router.http.errors import error_event
from router.openai.logprobs import ChatLogprobs, CompletionLogprobs, Logprobs, finite
from router.openai.protocol import ChatBody, CompletionBody
from router.request.generation import Delta, TextRequest, Usage
from router.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
# In the place of a chunk's text while its template is made; no other part of a chunk has it.
_TEXT_MARK = "\0"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """How a choice of one kind of response looks."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    opening: dict[str, Any] | None  # sent before a choice's first delta
    delta: Callable[[str], dict[str, Any]]  # new text in a chunk
    whole: Callable[[str], dict[str, Any]]  # the text of a response in one piece


COMPLETION = Shape(
    id_prefix="cmpl",
    object_name="text_completion",
    chunk_object_name="text_completion",
    opening=None,
    delta=lambda text: {"text": text},
    whole=lambda text: {"text": text},
)
CHAT = Shape(
    id_prefix="chatcmpl",
    object_name="chat.completion",
    chunk_object_name="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
)


class Formatter:
    """Builds one response, whole or in chunks."""

    def __init__(
        self,
        shape: Shape,
        head: dict[str, Any],
        request: TextRequest,
        logprobs: Sequence[Logprobs] | None,
        *,
        include_usage: bool,
        return_token_ids: bool,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._num_prompt_logprobs = num_prompt_logprobs
        self._shape = shape
        self._head = {**head, "object": shape.object_name}
        self._request = request
        self._logprobs = logprobs  # one for each choice
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids
        self._chunk_body = {**head, "object": shape.chunk_object_name}
        self._chunk_head = "data: " + json.dumps(self._chunk_body)[:-1] + ', "choices": ['
        self._chunk_tail = ('], "usage": null}' if include_usage else "]}") + "\n\n"
        self._started: set[int] = set()
        self._plain: dict[int, tuple[str, str]] = {}  # what stands around a text, by choice
        self._readers = None  # of a stream's choices
        if request.reading is not None:
            self._readers = [ChatReader(request.reading) for _ in range(request.num_choices)]

    def chunk(self, delta: Delta) -> bytes:
        """The events for one delta; nothing if it has nothing to tell. A token has an event of its
        own also where it completes no character, or may begin a stop string: clients tell by events
        that an answer goes on, and count them."""
        if delta.finish_reason is None and delta.index in self._plain:
            if not delta.text and not delta.token_ids:
                return b""
            before, after = self._plain[delta.index]
            return (before + encode_basestring_ascii(delta.text) + after).encode()
        logprobs = None
        if delta.logprobs or (self._request.echo and delta.prompt_logprobs is not None):
            logprobs = self._render_logprobs(delta.index, [delta])
        opening = b""
        if delta.index not in self._started:
            self._started.add(delta.index)
            opening = self._opening(delta.index)
            if self._logprobs is None and self._readers is None and not self._return_token_ids:
                self._plain[delta.index] = self._around_text(delta.index)
        said, finish_reason = self._said(delta)
        wordless = not said and logprobs is None and not self._return_token_ids
        wordless = wordless and delta.prompt_logprobs is None
        is_seen = opening or self._readers is not None or not delta.token_ids
        if wordless and finish_reason is None and is_seen:
            return opening
        choice = {
            "index": delta.index,
            **(said or self._shape.delta("")),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if self._return_token_ids:
            choice["token_ids"] = delta.token_ids
        self._add_prompt_logprobs(choice, delta)
        return opening + self._event(choice)

    def _render_logprobs(self, index: int, parts: Sequence[Delta]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        token_ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        for part in parts:
            if self._request.echo and part.prompt_logprobs is not None:
                token_ids += self._prompt_of(index)
                entries += [None, *part.prompt_logprobs]
            token_ids += part.token_ids
            entries += part.logprobs or ()
        return self._logprobs[index].render(token_ids, entries)

    def _said(self, delta: Delta) -> tuple[dict[str, Any] | None, str | None]:
        """The body of a chunk, if there is any, and the finish reason."""
        finish_reason = delta.finish_reason
        if self._readers is None:
            return self._shape.delta(delta.text) if delta.text else None, finish_reason
        reader = self._readers[delta.index]
        message = reader.feed(delta.text, is_last=finish_reason is not None)
        body = {"delta": message_delta_body(message)} if message else None
        return body, finish_reason_of(finish_reason, reader)

    def last_chunk(self, usage: Usage, timings: dict[str, Any] | None) -> bytes:
        """What comes after the choices, as far as it was asked for, and the end."""
        if not self._include_usage and timings is None:
            return DONE
        body = {**self._chunk_body, "choices": []}
        if self._include_usage:
            body["usage"] = usage_body(usage)
        if timings is not None:
            body["timings"] = timings
        return b"data: " + json.dumps(body).encode() + b"\n\n" + DONE

    def failure(self, error: PdserveError) -> bytes:
        """Ends a stream that cannot go on. No `[DONE]` follows."""
        return error_event(error)

    def whole(
        self,
        deltas: Sequence[Sequence[Delta]],
        usage: Usage,
        timings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response of a request that does not stream; `deltas` by choice."""
        choices = []
        for index, parts in enumerate(deltas):
            token_ids = [token_id for part in parts for token_id in part.token_ids]
            logprobs = self._render_logprobs(index, parts)
            text, finish_reason = "".join(part.text for part in parts), parts[-1].finish_reason
            if self._request.reading is None:
                said = self._shape.whole(text)
            else:
                reader = ChatReader(self._request.reading)
                said = {"message": message_body(reader.feed(text, is_last=True))}
                finish_reason = finish_reason_of(finish_reason, reader)
            choice = {
                "index": index,
                **said,
                "logprobs": logprobs,
                "finish_reason": finish_reason,
            }
            if self._return_token_ids:
                choice["token_ids"] = token_ids
                choice["prompt_token_ids"] = self._prompt_of(index)
            self._add_prompt_logprobs(choice, parts[0])
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": usage_body(usage)}
        if timings is not None:
            body["timings"] = timings
        return body

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    def _opening(self, index: int) -> bytes:
        if self._shape.opening is None and not self._return_token_ids:
            return b""
        choice: dict[str, Any] = {
            "index": index,
            **(self._shape.opening or self._shape.delta("")),
            "logprobs": None,
            "finish_reason": None,
        }
        if self._return_token_ids:
            choice["prompt_token_ids"] = self._prompt_of(index)
            choice["token_ids"] = []
        return self._event(choice)

    def _around_text(self, index: int) -> tuple[str, str]:
        """A chunk with nothing but text differs from the next one in its text alone."""
        said = self._shape.delta(_TEXT_MARK)
        choice = {"index": index, **said, "logprobs": None, "finish_reason": None}
        before, _, after = json.dumps(choice).partition(json.dumps(_TEXT_MARK))
        return self._chunk_head + before, after + self._chunk_tail

    def _event(self, choice: dict[str, Any]) -> bytes:
        return (self._chunk_head + json.dumps(choice) + self._chunk_tail).encode()

    def _add_prompt_logprobs(self, choice: dict[str, Any], first: Delta) -> None:
        """vLLM's form, if it was asked for: by token id, for each prompt token but the first."""
        num_top = self._num_prompt_logprobs
        if num_top is None or first.prompt_logprobs is None:
            return
        listed: list[dict[str, Any] | None] = [None]
        prompt = self._prompt_of(first.index)
        for token_id, entry in zip(prompt[1:], first.prompt_logprobs, strict=True):
            best = list(entry.top[:num_top])
            ranks = {i: rank for rank, (i, _) in enumerate(best, start=1)}
            both = dict([(token_id, entry.logprob), *best])
            listed.append(
                {
                    str(i): {"logprob": finite(value), "rank": ranks.get(i)}
                    for i, value in both.items()
                }
            )
        choice["prompt_logprobs"] = listed

    def _prompt_of(self, index: int) -> list[int]:
        return list(self._request.prompts[index // self._request.n])


def message_body(message: MessageDelta) -> dict[str, Any]:
    """A whole message of the assistant."""
    body: dict[str, Any] = {
        "role": "assistant",
        "content": None if message.calls and not message.content else message.content,
        "refusal": None,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return body


def message_delta_body(message: MessageDelta) -> dict[str, Any]:
    """What is new in a message, for one chunk."""
    body: dict[str, Any] = {}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.content:
        body["content"] = message.content
    if message.calls:
        body["tool_calls"] = [
            {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is None
            else {
                "index": call.index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return body


def finish_reason_of(reason: str | None, reader: ChatReader) -> str | None:
    """`reason`, or that the answer was calls."""
    return "tool_calls" if reason == "stop" and reader.has_calls else reason


def make_formatter(
    shape: Shape,
    body: CompletionBody | ChatBody,
    request: TextRequest,
    model: str,
    tokenizer: Tokenizer,
) -> Formatter:
    """The formatter of one response, under a fresh id."""
    logprobs: list[Logprobs] | None = None
    if request.sampling.logprobs is not None:
        logprobs = [
            ChatLogprobs(tokenizer) if shape is CHAT else CompletionLogprobs(tokenizer, request)
            for _ in range(request.num_choices)
        ]
    head = {
        "id": f"{shape.id_prefix}-{uuid.uuid4().hex}",
        "object": shape.object_name,
        "created": int(time.time()),
        "model": model,
    }
    return Formatter(
        shape,
        head,
        request,
        logprobs,
        include_usage=body.include_usage,
        return_token_ids=bool(body.return_token_ids),
        num_prompt_logprobs=body.prompt_logprobs if isinstance(body, CompletionBody) else None,
    )
