"""Chat messages of the OpenAI API in the one form that chat templates expect."""

import json
from typing import Any

from core.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_KEPT_STRINGS = ("name", "tool_call_id", "reasoning_content")
_UNSUPPORTED = ("audio", "function_call")


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of the OpenAI API in the one form that templates expect: `content` a string,
    arguments of tool calls an object, no null and no unknown key. Text parts are joined by a
    newline, as vLLM does for templates that take strings. The input is not changed.

    Raises RequestError whose `param` names the part, like `messages[1].content[0].type`."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages: expected a list of at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def refusal(where: str, expected: str, got: Any) -> RequestError:
    shown = "null" if got is None else repr(got)[:60]
    return RequestError(f"{where}: expected {expected}, got {shown}", param=where)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refusal(where, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise refusal(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for key in _UNSUPPORTED:
        if message.get(key):
            raise RequestError(f"{where}.{key}: not supported", param=f"{where}.{key}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise refusal(f"{where}.content", "a string or a list of text parts", None)
    normal: dict[str, Any] = {"role": role, "content": content_text(content, f"{where}.content")}
    for key in _KEPT_STRINGS:
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise refusal(f"{where}.{key}", "a string", value)
            normal[key] = value
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant":
            raise RequestError(
                f"{where}.tool_calls: only an assistant message has them",
                param=f"{where}.tool_calls",
            )
        if not isinstance(calls, list):
            raise refusal(f"{where}.tool_calls", "a list", calls)
        normal["tool_calls"] = [
            tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return normal


def content_text(content: Any, where: str) -> str:
    """The text of a message's content. `where` is its path, for RequestError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refusal(where, "a string or a list of text parts", content)
    texts = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise refusal(at, "an object", part)
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise refusal(f"{at}.type", "a text part (this model reads text alone)", kind)
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise refusal(f"{at}.{_TEXT_PARTS[kind]}", "a string", text)
        texts.append(text)
    return "\n".join(texts)


def tool_call(call: Any, where: str) -> dict[str, Any]:
    """One call as templates expect it. `where` is its path, for RequestError."""
    if not isinstance(call, dict):
        raise refusal(where, "an object", call)
    if call.get("type", "function") != "function":
        raise refusal(f"{where}.type", "function", call["type"])
    function = call.get("function")
    if not isinstance(function, dict):
        raise refusal(f"{where}.function", "an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refusal(f"{where}.function.name", "a name", name)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise refusal(f"{where}.function.arguments", "JSON of an object", arguments) from None
    if not isinstance(arguments, dict):
        raise refusal(f"{where}.function.arguments", "JSON of an object", arguments)
    normal: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        normal["id"] = call["id"]
    return normal
