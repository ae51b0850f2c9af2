"""`POST /v1/responses`: OpenAI's Responses API as a request for one chat answer.

Nothing is stored: a conversation's items come whole with every request, and so `store` and
`previous_response_id` are refused.

| field | accepted | remark |
|---|---|---|
| input | text, or items | message, function_call, function_call_output, reasoning; text parts |
| instructions | text | the first message, of the system |
| tools, tool_choice, parallel_tool_calls | functions | as in chats |
| text.format | text, json_object, json_schema | |
| include | message.output_text.logprobs | with top_logprobs 0 .. 20; not with tools or reasoning |
| include | reasoning.encrypted_content | asks for nothing: reasoning is returned in plain text |
| metadata | up to 16 texts | given back |
| max_output_tokens, temperature, top_p, and vLLM's extras | as in chats | |
"""

from typing import Annotated, Any

from pydantic import Field

from core.errors import RequestError
from router.chat.messages import content_text, refusal, tool_call
from router.chat.tools import MAX_TOOLS
from router.openai.protocol import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    ChatBody,
    Neutral,
    Penalty,
    Priority,
    Salt,
    Short,
    StrictBody,
    TemplateSwitches,
    Unit,
    parse_chat,
    parse_known,
)

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_MAX_METADATA = 16
_ROLES = ("system", "developer", "user", "assistant")
# What is known and not implemented: the values that ask for nothing.
_NEUTRAL: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_retention": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
_WHY_NOT = {
    "store": "store: responses are not stored here; send false, or leave it out",
    "previous_response_id": (
        "previous_response_id: responses are not stored here; send the earlier items in input"
    ),
}


class TextOptions(StrictBody):
    format: dict[str, Any] | None = None


class StreamOptions(StrictBody):
    include_obfuscation: Annotated[bool, Field(json_schema_extra={"enum": [False]})] | None = None


class ResponseBody(StrictBody):
    """`None` is the default everywhere."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    text: TextOptions | None = None
    # Checked by router.chat.tools.
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=_MAX_METADATA),
        ]
        | None
    ) = None
    user: Short | None = None
    prompt_cache_key: Short | None = None
    safety_identifier: Short | None = None
    # vLLM
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    structured_outputs: dict[str, Any] | None = None
    # pdserve
    timings: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    @property
    def text_format(self) -> dict[str, Any]:
        wish = self.text.format if self.text is not None else None
        return {"type": "text"} if wish is None else wish


# Fields that a chat has under the same name.
_SAME = frozenset(ResponseBody.model_fields) & frozenset(ChatBody.model_fields)
_SAME -= {"top_logprobs", "stream_options", "tools"}


def parse_response(data: dict[str, Any]) -> ResponseBody:
    """Raises RequestError that names the field."""
    for name, why in _WHY_NOT.items():
        if data.get(name) not in (None, False):
            raise RequestError(why, param=name, code="unsupported_parameter")
    text = data.get("text")
    if isinstance(text, dict) and text.get("verbosity") in (None, "medium"):
        data = {**data, "text": {k: v for k, v in text.items() if k != "verbosity"}}
    body = parse_known(ResponseBody, data, _NEUTRAL)
    for position, wish in enumerate(body.include or ()):
        if wish not in _INCLUDABLE:
            at = f"include[{position}]"
            raise RequestError(f"{at}: expected one of {', '.join(_INCLUDABLE)}", param=at)
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if body.stream_options.include_obfuscation:
            raise RequestError(
                "stream_options.include_obfuscation is not supported", param="stream_options"
            )
    return body


def chat_of(body: ResponseBody) -> ChatBody:
    """The chat that asks for the same. Raises RequestError in the names of `body`."""
    data = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    switches = body.chat_template_kwargs
    if switches is not None:
        data["chat_template_kwargs"] = switches.model_dump()
    data["messages"] = _messages(body)
    if body.max_output_tokens is not None:
        data["max_completion_tokens"] = body.max_output_tokens
    if body.wants_logprobs:
        data |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        data["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    wish = body.text_format
    if wish.get("type") == "json_schema":
        inner = {key: value for key, value in wish.items() if key != "type"}
        wish = {"type": "json_schema", "json_schema": inner}
    if body.text is not None and body.text.format is not None:
        data["response_format"] = wish
    try:
        return parse_chat(data)
    except RequestError as error:
        raise in_response_names(error) from None


def in_response_names(error: RequestError) -> RequestError:
    """What is wrong with the chat of `chat_of`, in the names of the client's fields."""
    old = error.param
    if old is None:
        return error
    new = old.replace(".function.", ".")
    for theirs, ours in (
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("messages", "input"),
    ):
        if new == theirs or new.startswith((f"{theirs}[", f"{theirs}.")):
            new = ours + new[len(theirs) :]
    error.param = new
    if error.message.startswith(old):
        error.message = new + error.message[len(old) :]
    return error


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type: only functions are supported", param=f"{where}.type")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    """The items as chat messages. What the model said in one turn (reasoning, a message, calls)
    becomes one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for position, item in enumerate(body.input):
        where = f"input[{position}]"
        try:
            _add_item(messages, item, where)
        except RequestError as error:
            raise in_response_names(error) from None
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise refusal(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
        content = item.get("content")
        if content is None:
            raise refusal(f"{where}.content", "a string or a list of text parts", None)
        text = content_text(content, f"{where}.content")
        if role == "assistant" and last is not None and _is_reasoning_alone(last):
            last["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise refusal(f"{where}.call_id", "a string", call_id)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = tool_call({"id": call_id, "function": function}, where)
        if last is None:
            last = {"role": "assistant", "content": None}
            messages.append(last)
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id, output = item.get("call_id"), item.get("output")
        if not isinstance(call_id, str):
            raise refusal(f"{where}.call_id", "a string", call_id)
        if output is None:
            raise refusal(f"{where}.output", "a string or a list of text parts", None)
        text = content_text(output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    elif kind == "reasoning":
        text = _reasoning_text(item.get("content") or [], f"{where}.content")
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    else:
        raise RequestError(
            f"{where}.type: {str(kind)[:40]!r} is not supported (message, function_call, "
            "function_call_output and reasoning are)",
            param=f"{where}.type",
        )


def _is_reasoning_alone(message: dict[str, Any]) -> bool:
    return message["content"] is None and "tool_calls" not in message


def _reasoning_text(content: Any, where: str) -> str:
    if not isinstance(content, list):
        raise refusal(where, "a list of reasoning_text parts", content)
    texts = []
    for position, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise refusal(f"{where}[{position}].text", "a string", text)
        texts.append(text)
    return "\n".join(texts)
