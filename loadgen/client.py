"""One streamed request to an OpenAI-style server, with the time of every chunk.

Each request has a connection of its own, so a reused one that the server has just closed never
counts as a failure; TTFT includes the connecting. Errors become kinds, never exceptions: a load
test goes on.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from core.errors import PdserveError, UnavailableError
from loadgen.http_stream import ConnectFailed, HttpTarget, ProtocolError, post
from loadgen.record import RequestRecord

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Servers that take token-id prompts and `ignore_eos`.
_EXTENDED_SERVERS = {"pdserve", "vllm", "sglang"}
_MAX_LINE = 16 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what every body holds. A field of `extra` whose value is None is left
    out of the body."""

    url: str
    model: str
    endpoint: str = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: str | list[int], max_tokens: int) -> bytes:
        if self.endpoint == "chat":
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            asked = {"prompt": prompt}
        body = {
            "model": self.model,
            **asked,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        kept = {name: value for name, value in body.items() if value is not None}
        return json.dumps(kept, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What /v1/models says of the model."""

    model: str
    owned_by: str = ""
    max_model_len: int | None = None

    @property
    def is_extended(self) -> bool:
        return self.owned_by in _EXTENDED_SERVERS


def base_url(url: str) -> str:
    """`host:port`, `http://host/` and `http://host/v1` alike -> what /v1/... is put behind."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


async def server_info(url: str, model: str | None, api_key: str | None) -> ServerInfo:
    """The named model, or the first that is served. Raises UnavailableError if nothing answers
    or the name cannot be known."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0, headers=headers) as client:
            response = await client.get(f"{url}/v1/models")
        cards = response.json()["data"] if response.is_success else []
        cards = {card["id"]: card for card in cards}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"{url}: {str(error) or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError):
        cards = {}
    if model is None:
        if not cards:
            raise UnavailableError(f"{url}/v1/models names no model: give one with --model")
        model = next(iter(cards))
    card = cards.get(model, {})
    limit = card.get("max_model_len")
    return ServerInfo(
        model, str(card.get("owned_by", "")), limit if isinstance(limit, int) else None
    )


class StreamingClient:
    """Sends requests and fills records. `now` is the run's clock."""

    def __init__(self, target: Target, now: Callable[[], float] = time.perf_counter) -> None:
        self.target = target
        self.now = now
        self._address = HttpTarget.from_url(target.url + _PATHS[target.endpoint])
        self._headers = {"content-type": "application/json", **target.headers}

    async def send(self, body: bytes, record: RequestRecord) -> None:
        """Sends, reads to the end and notes all in `record`. Raises only CancelledError."""
        reader = _ChunkReader(record, self.now)
        record.sent_s = self.now()
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._stream(body, record, reader)
        except TimeoutError:
            record.error = "timeout"
            record.detail = f"not done within {self.target.timeout_s:g} s"
        except ConnectFailed as error:
            record.error, record.detail = "connect", str(error)
        except (OSError, ProtocolError) as error:
            record.error, record.detail = "disconnected", str(error) or type(error).__name__
        except ValueError as error:
            record.error, record.detail = "bad answer", str(error)[:300]
        finally:
            record.ended_s = self.now()
        if record.error is None:
            record.error = reader.missing()

    async def _stream(self, body: bytes, record: RequestRecord, reader: "_ChunkReader") -> None:
        async with post(self._address, self._headers, body) as answer:
            if answer.status != 200:
                record.error = f"HTTP {answer.status}"
                record.detail = (await answer.text())[:300]
                return
            async for data in answer.pieces():
                reader.feed(data)


class _ChunkReader:
    """Server-sent events out of pieces of bytes; what came in one piece has one time."""

    def __init__(self, record: RequestRecord, now: Callable[[], float]) -> None:
        self._record = record
        self._now = now
        self._buffer = b""
        self._is_done = False

    def feed(self, data: bytes) -> None:
        """Raises ValueError for what is no event stream."""
        now = self._now()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_LINE:
            raise ValueError("a line of the stream is too long")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def missing(self) -> str | None:
        """The kind of error that an apparently good stream has after all."""
        if not self._record.token_times_s:
            return "no tokens"
        return None if self._is_done else "cut off"

    def _event(self, data: bytes, now: float) -> None:
        record = self._record
        if data == b"[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event that is no object: {data[:100]!r}")
        if event.get("error"):
            record.error, record.detail = "error in stream", str(event["error"])[:300]
            return
        usage = event.get("usage")
        if usage:
            record.prompt_tokens = usage.get("prompt_tokens")
            record.output_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens")
        for choice in event.get("choices") or ():
            finish_reason = choice.get("finish_reason")
            self._is_done = self._is_done or finish_reason is not None
            if _carries_tokens(choice, finish_reason):
                record.token_times_s.append(now)


def _carries_tokens(choice: dict[str, Any], finish_reason: str | None) -> bool:
    """A chunk with text does; one without does too (a token may have no text of its own yet),
    unless it only opens or only ends the answer."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or finish_reason is None
    if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
        return True
    return finish_reason is None and "role" not in delta


async def probe(client: StreamingClient, prompt: str | list[int], max_tokens: int) -> RequestRecord:
    """One request by itself. Raises PdserveError if it fails."""
    record = RequestRecord(index=-1, scheduled_s=client.now())
    await client.send(client.target.body(prompt, max_tokens), record)
    if record.error is not None and record.error != "no tokens":
        what = f"{record.error}: {record.detail}" if record.detail else record.error
        raise PdserveError(f"{client.target.url}: a first request failed: {what}")
    return record
