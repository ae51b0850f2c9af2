"""`pdserve chat`: a conversation in the terminal."""

import sys
from typing import Any

import httpx
from rich.console import Console

from cli.client import chat_stream, get_json, router_client
from core.errors import PdserveError, UnavailableError


def run_chat(url: str, prompt: str | None, system: str | None, max_tokens: int | None) -> None:
    """One answer to `prompt`, or without one an interactive conversation: Ctrl-C ends the answer,
    at the prompt the program. From a pipe, the whole of stdin is the prompt."""
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    with router_client(url) as client:
        models = get_json(client, "/v1/models").get("data", [])
        if not models:
            raise UnavailableError(f"{url} serves no model")
        conversation = Conversation(client, models[0]["id"], system, max_tokens)
        if prompt is not None:
            conversation.say(prompt)
        else:
            _talk(conversation)


class Conversation:
    """The messages so far. An answer that was cut short is part of it as far as it went."""

    def __init__(
        self, client: httpx.Client, model: str, system: str | None, max_tokens: int | None
    ) -> None:
        self.model = model
        self._client = client
        self._max_tokens = max_tokens
        self._messages = [{"role": "system", "content": system}] if system else []

    def say(self, prompt: str) -> None:
        """Sends `prompt` and prints the answer as it comes."""
        self._messages.append({"role": "user", "content": prompt})
        body: dict[str, Any] = {"model": self.model, "messages": self._messages}
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        answer: list[str] = []
        try:
            for text in chat_stream(self._client, body):
                answer.append(text)
                print(text, end="", flush=True)
        finally:
            print(flush=True)
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()


def _talk(conversation: Conversation) -> None:
    console = Console(highlight=False)
    console.print(f"[dim]{conversation.model}. Ctrl-C ends an answer, Ctrl-D the talk.[/dim]")
    while True:
        try:
            prompt = console.input("[bold green]> [/bold green]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not prompt:
            continue
        try:
            conversation.say(prompt)
        except KeyboardInterrupt:
            continue
        except PdserveError as error:  # this answer failed; the next one may not
            console.print(f"[red]{error.message}[/red]")
