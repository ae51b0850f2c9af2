"""A server-sent-events server whose timing is scripted, in a thread of its own."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Script:
    """How one request is answered. `delays_s[i]` passes before chunk i."""

    delays_s: list[float]
    tokens_per_chunk: int = 1
    status: int = 200
    usage: bool = True
    ends: str = "done"  # done | cut (no [DONE], no finish reason) | error (an event) | close
    cached: int = 0


def steady(num_tokens: int, first_s: float = 0.0, gap_s: float = 0.0) -> Script:
    return Script([first_s] + [gap_s] * (num_tokens - 1))


@dataclass(slots=True)
class FakeLlm:
    """`script_for` decides by the body. `bodies` holds all that came, in order."""

    script_for: Callable[[dict[str, Any]], Script] = lambda body: steady(body["max_tokens"])
    owned_by: str = "pdserve"
    max_model_len: int | None = None
    tokens_per_word: float = 1.0
    overhead: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    in_flight: int = 0
    most_in_flight: int = 0

    def num_prompt_tokens(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            prompt: Any = body["messages"][0]["content"]
        else:
            prompt = body["prompt"]
        if isinstance(prompt, list):
            return len(prompt)
        return round(len(prompt.split()) * self.tokens_per_word) + self.overhead

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (li.partition(":") for li in lines)}
            if first.startswith("GET"):
                self._send_json(writer, 200, {"object": "list", "data": [self._card()]})
            else:
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.bodies.append(body)
                self.headers.append(headers)
                await self._answer(writer, body, "chat" in first)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    def _card(self) -> dict[str, Any]:
        return {"id": "fake", "owned_by": self.owned_by, "max_model_len": self.max_model_len}

    async def _answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], is_chat: bool
    ) -> None:
        script = self.script_for(body)
        if script.status != 200:
            self._send_json(writer, script.status, {"error": {"message": "no, scripted"}})
            return
        if script.ends == "close":
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                         b"connection: close\r\n\r\n")  # fmt: skip
            async for event in self._events(script, body, is_chat):
                writer.write(b"data: " + event + b"\n\n")
                await writer.drain()
        finally:
            self.in_flight -= 1

    async def _events(
        self, script: Script, body: dict[str, Any], is_chat: bool
    ) -> AsyncIterator[bytes]:
        def choice(text: str, finish: str | None) -> bytes:
            said = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
            return json.dumps({"choices": [{"index": 0, **said, "finish_reason": finish}]}).encode()

        if is_chat:
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield json.dumps({"choices": [opening]}).encode()
        for delay_s in script.delays_s:
            if delay_s:
                await asyncio.sleep(delay_s)
            yield choice(" word" * script.tokens_per_chunk, None)
        if script.ends == "error":
            yield b'{"error": {"message": "the worker was lost"}}'
        if script.ends != "done":
            return
        yield choice("", "length")
        if script.usage and (body.get("stream_options") or {}).get("include_usage"):
            yield json.dumps(
                {
                    "choices": [],
                    "usage": {
                        "prompt_tokens": self.num_prompt_tokens(body),
                        "completion_tokens": len(script.delays_s) * script.tokens_per_chunk,
                        "prompt_tokens_details": {"cached_tokens": script.cached},
                    },
                }
            ).encode()
        yield b"[DONE]"

    def _send_json(self, writer: asyncio.StreamWriter, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % (status, len(body)) + body
        )


@contextlib.contextmanager
def serving(llm: FakeLlm) -> Iterator[FakeLlm]:
    """Runs it on a free port until the block ends."""
    started = threading.Event()
    stop: list[Callable[[], None]] = []

    async def main() -> None:
        server = await asyncio.start_server(llm.handle, "127.0.0.1", 0, backlog=512)
        llm.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        started.set()
        async with server:
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(10)
        yield llm
    finally:
        stop[0]()
        thread.join(10)
