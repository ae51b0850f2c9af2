"""Reads server-sent events as OpenAI's clients do."""

import json
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a whole stream, without `[DONE]`."""
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def is_done(text: str) -> bool:
    return text.endswith("data: [DONE]\n\n")


def stream_body(text: str) -> tuple[str, str | None]:
    """Text and finish reason of a completion stream with one choice."""
    choices = [event["choices"][0] for event in events(text) if event.get("choices")]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
