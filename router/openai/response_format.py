"""The answer of `/v1/responses`: output items, whole or as a stream of events.

    response.created, response.in_progress
    response.output_item.added                       for each item in turn:
        response.content_part.added                      reasoning and message
        response.reasoning_text.delta ... .done          reasoning
        response.output_text.delta ... .done             message
        response.content_part.done                       reasoning and message
        response.function_call_arguments.delta ... .done function_call
    response.output_item.done
    response.completed | response.incomplete         or response.failed, error

Items follow each other, so at most one is open. Characters are read one by one: the items are the
same however the text was cut on its way.
"""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.errors import OverloadedError, PdserveError, RequestError
from router.chat.output import CallDelta, ChatReader, MessageDelta
from router.http.errors import error_body
from router.openai.logprobs import ChatLogprobs
from router.openai.response_body import ResponseBody
from router.request.generation import Delta, TextRequest, Usage
from router.text.tokenizer import Tokenizer

_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text"}


@dataclass(slots=True)
class _Item:
    """One output item. `text`: what it says, or a call's arguments; `unsent` is its end."""

    kind: str
    index: int
    call: CallDelta | None = None
    id: str = ""
    status: str = "in_progress"
    text: str = ""
    unsent: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{_PREFIX[self.kind]}_{uuid.uuid4().hex}"

    def add(self, text: str) -> None:
        self.text += text
        self.unsent += text

    def part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PART[self.kind], "text": self.text}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": self.logprobs}
        return part

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            call = {"call_id": self.call.id, "name": self.call.name, "arguments": self.text}
            return {**body, **call}
        content = [self.part()] if self.status != "in_progress" else []
        if self.kind == "reasoning":
            return {**body, "summary": [], "content": content}
        return {**body, "role": "assistant", "content": content}


class ResponseFormatter:
    """Builds one response under a fresh id. Takes deltas either by `chunk` or by `whole`."""

    def __init__(
        self, body: ResponseBody, request: TextRequest, model: str, tokenizer: Tokenizer
    ) -> None:
        """Raises RequestError for logprobs that have no text to belong to."""
        if body.wants_logprobs and request.reading is not None:
            raise RequestError(
                "logprobs are for answers that are one text: not with tools, nor with a model "
                "that reasons",
                param="include",
                code="unsupported_parameter",
            )
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self._head = _head(self.response_id, body, model)
        self._is_streaming = bool(body.stream)
        self._reader = ChatReader(request.reading) if request.reading is not None else None
        self._logprobs = ChatLogprobs(tokenizer) if body.wants_logprobs else None
        self._unsent_logprobs: list[dict[str, Any]] = []
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._num_events = 0
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._finish_reason: str | None = None

    def chunk(self, delta: Delta) -> bytes:
        """The events for one delta."""
        opening = []
        if not self._num_events:
            body = self._body("in_progress", None)
            opening = [
                self._event("response.created", response=body),
                self._event("response.in_progress", response=body),
            ]
        return b"".join([*opening, *self._take(delta)])

    def last_chunk(self, usage: Usage, timings: dict[str, Any] | None) -> bytes:
        response = self._final(usage, timings)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: PdserveError) -> bytes:
        """Ends a stream that cannot go on. The second event is what makes clients raise."""
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        if self._open is not None:
            self._open.status = "incomplete"
        failed = {
            **self._body("failed", None),
            "error": {"code": code, "message": error.message},
        }
        inner = error_body(error)["error"]
        said = {key: inner[key] for key in ("code", "message", "param")}
        return self._event("response.failed", response=failed) + self._event(
            "error", **said, error=inner
        )

    def whole(
        self,
        deltas: Sequence[Sequence[Delta]],
        usage: Usage,
        timings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        for delta in deltas[0]:
            for _ in self._take(delta):
                pass
        return self._final(usage, timings)

    # ------------------------------------------------------------ reading

    def _take(self, delta: Delta) -> Iterator[bytes]:
        self._num_tokens += len(delta.token_ids)
        if self._logprobs is not None and delta.logprobs:
            entries = self._logprobs.render(delta.token_ids, delta.logprobs)["content"]
            self._unsent_logprobs += entries
        self._finish_reason = delta.finish_reason
        for piece in self._pieces(delta.text, is_last=delta.finish_reason is not None):
            if piece.reasoning:
                yield from self._add("reasoning", piece.reasoning)
            if piece.content:
                yield from self._add("message", piece.content)
            for call in piece.calls:
                yield from self._add("function_call", call.arguments, call)
        if self._open is not None:
            yield from self._flush(self._open)
            if self._open.kind == "reasoning":
                self._num_reasoning_tokens = self._num_tokens
        if delta.finish_reason is not None:
            if not self._items:
                yield from self._add("message", "")
            yield from self._close(delta.finish_reason)

    def _pieces(self, text: str, is_last: bool) -> Iterator[MessageDelta]:
        if self._reader is None:
            yield MessageDelta(content=text)
            return
        for character in text:
            yield self._reader.feed(character)
        if is_last:
            yield self._reader.feed("", is_last=True)

    def _add(self, kind: str, text: str, call: CallDelta | None = None) -> Iterator[bytes]:
        starts = call is not None and call.name is not None
        if self._open is None or self._open.kind != kind or starts:
            yield from self._close()
            self._open = item = _Item(kind, len(self._items), call)
            self._items.append(item)
            yield self._event(
                "response.output_item.added", output_index=item.index, item=item.body()
            )
            if kind in _PART:
                yield self._about("response.content_part.added", item, part=item.part())
        self._open.add(text)

    def _flush(self, item: _Item) -> Iterator[bytes]:
        text, item.unsent = item.unsent, ""
        if not text:
            return
        if item.kind == "function_call":
            yield self._about("response.function_call_arguments.delta", item, delta=text)
        elif item.kind == "reasoning":
            yield self._about("response.reasoning_text.delta", item, delta=text)
        else:
            yield self._about(
                "response.output_text.delta", item, delta=text, logprobs=self._move_logprobs(item)
            )

    def _close(self, finish_reason: str | None = None) -> Iterator[bytes]:
        """Ends the open item, if there is one. `finish_reason`: it is also the last."""
        item, self._open = self._open, None
        if item is None:
            return
        yield from self._flush(item)
        item.status = "incomplete" if finish_reason == "length" else "completed"
        if item.call is not None:
            yield self._about(
                "response.function_call_arguments.done",
                item,
                name=item.call.name,
                arguments=item.text,
            )
        else:
            rest: dict[str, Any] = {"text": item.text}
            if item.kind == "message":
                self._move_logprobs(item)
                rest["logprobs"] = item.logprobs
            yield self._about(f"response.{_PART[item.kind]}.done", item, **rest)
            yield self._about("response.content_part.done", item, part=item.part())
        yield self._event("response.output_item.done", output_index=item.index, item=item.body())

    def _move_logprobs(self, item: _Item) -> list[dict[str, Any]]:
        moved, self._unsent_logprobs = self._unsent_logprobs, []
        item.logprobs += moved
        return moved

    # ------------------------------------------------------------ bodies

    def _about(self, kind: str, item: _Item, **fields: Any) -> bytes:
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if item.call is None:
            where["content_index"] = 0
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._is_streaming:
            return b""
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    def _final(self, usage: Usage, timings: dict[str, Any] | None) -> dict[str, Any]:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        body = self._body(status, self._usage(usage))
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        if timings is not None:
            body["timings"] = timings
        return body

    def _body(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        output = [item.body() for item in self._items]
        return {**self._head, "status": status, "output": output, "usage": usage}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _head(response_id: str, body: ResponseBody, model: str) -> dict[str, Any]:
    """What does not change while the answer is written."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "background": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": body.text_format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
