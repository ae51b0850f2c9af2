"""Chats with tools and reasoning, over HTTP."""

import json

import openai
import pytest

from core.errors import RequestError
from router.chat.template import ChatTemplate
from router.chat.tools import ChatReading, parse_tools
from rpc.codec import request_from_pb
from support.byte_tokenizer import byte_tokenizer
from support.fake_answers import says
from support.router import Running, running
from support.sse import events

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}Use <tool_call>.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "f"}},
]  # fmt: skip
HI = [{"role": "user", "content": "hi"}]
TWO_CALLS = (
    'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)


def make_all_say(router: Running, text: str) -> None:
    for worker in router.cluster.everyone:
        worker.script = says(text)


@pytest.fixture
async def hermes():
    async with running("router.reasoning_parser=qwen3", tokenizer=byte_tokenizer(TEMPLATE)) as it:
        make_all_say(it, TWO_CALLS)
        yield it


def joined(chunks: list[dict], index: int = 0) -> tuple[dict, list[str]]:
    """The message that the deltas of a choice make, and its finish reasons."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert "finish_reason" in choice
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    name = call["function"]["name"]
                    message["tool_calls"].append({"name": name, "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, reasons


async def test_a_stream_is_the_whole_message(hermes):
    """V36: two calls, two choices; one finish reason each, at the end."""
    fields = {"messages": HI, "tools": TOOLS, "n": 2, "temperature": 0}
    whole = (await hermes.post(CHAT, **fields)).json()
    chunks = events((await hermes.post(CHAT, **fields, stream=True)).text)
    for choice in whole["choices"]:
        message, reasons = joined(chunks, choice["index"])
        said = choice["message"]
        assert said["content"] == message["content"] == "Sure."
        calls = [call["function"] for call in said["tool_calls"]]
        assert calls == message["tool_calls"]
        assert json.loads(calls[0]["arguments"]) == {"city": "Köln"} and calls[1]["name"] == "f"
        assert len({call["id"] for call in said["tool_calls"]}) == 2
        assert reasons == [choice["finish_reason"]] == ["tool_calls"]


async def test_calls_alone_have_no_content_and_a_cut_one_says_length(hermes):
    make_all_say(hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    body = (await hermes.post(CHAT, messages=HI, tools=TOOLS)).json()
    assert body["choices"][0]["message"]["content"] is None
    body = (await hermes.post(CHAT, messages=HI, tools=TOOLS, max_tokens=41)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


async def test_parallel_calls_can_be_turned_off(hermes):
    fields = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
    body = (await hermes.post(CHAT, **fields)).json()
    assert [c["function"]["name"] for c in body["choices"][0]["message"]["tool_calls"]] == [
        "get_weather"
    ]


async def test_with_none_the_model_hears_of_no_tool_and_calls_are_text(hermes):
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        body = (await hermes.post(CHAT, messages=HI, **fields)).json()
        choice = body["choices"][0]
        assert choice["message"]["content"] == TWO_CALLS and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    prompt = bytes(hermes.worker("prefill-0").requests[0].prompt_token_ids)
    assert prompt == b"user: hiassistant:"


async def test_the_template_gets_tools_and_replayed_calls(hermes):
    """V31: our own message, and what the tool said, go back in."""
    answer = (await hermes.post(CHAT, messages=HI, tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"]}
    for content in ("21 C", [{"type": "text", "text": "21 C"}]):
        messages = [*HI, answer, {**result, "content": content}]
        assert (await hermes.post(CHAT, messages=messages, tools=TOOLS)).status_code == 200
    first, second = (
        bytes(r.prompt_token_ids).decode() for r in hermes.worker("prefill-0").requests[1:]
    )
    assert first == second
    assert first.startswith('{"type": "function", "function": {"name": "get_weather"')
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>' in first
    assert first.endswith("tool: 21 Cassistant:")


async def test_reasoning_is_split_out(hermes):
    make_all_say(hermes, "<think>\nLet me see.\n</think>\n\nYes.")
    fields = {"messages": HI, "temperature": 0}
    message = (await hermes.post(CHAT, **fields)).json()["choices"][0]["message"]
    assert message["content"] == "Yes." and message["reasoning_content"] == "Let me see."
    streamed, reasons = joined(events((await hermes.post(CHAT, **fields, stream=True)).text))
    assert (streamed["content"], streamed["reasoning_content"]) == ("Yes.", "Let me see.")
    assert reasons == ["stop"]
    make_all_say(hermes, "hm</think>Yes.")
    fields["chat_template_kwargs"] = {"enable_thinking": True}  # ends the prompt with <think>
    message = (await hermes.post(CHAT, **fields)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")


async def test_markers_that_are_special_tokens_are_seen():
    special = ("[TOOL_CALLS]",)
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
    async with running(tokenizer=byte_tokenizer(template, special)) as router:
        rest = '[{"name": "f", "arguments": {}}]'
        ids = [257, *rest.encode(), 256]
        for worker in router.cluster.everyone:
            worker.script = lambda prompt, index: ids[index]
        body = (await router.post(CHAT, messages=HI, tools=TOOLS)).json()
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        body = (await router.post(CHAT, messages=HI)).json()
        assert body["choices"][0]["message"]["content"] == rest


async def test_a_grammar_forces_calls(hermes):
    make_all_say(hermes, '[{"name": "f", "parameters": {"a": 1}}]')
    fields = {"messages": HI, "tools": TOOLS, "max_tokens": 99}
    for parallel in (True, False):
        choice = (
            await hermes.post(CHAT, **fields, tool_choice="required", parallel_tool_calls=parallel)
        ).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {
            "name": "f", "arguments": '{"a": 1}',
        }  # fmt: skip
    make_all_say(hermes, '{"city": "Bonn"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = (await hermes.post(CHAT, **fields, tool_choice=named)).json()
    call = body["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    schemas = [
        json.loads(request_from_pb(r).sampling.grammar.value)
        for r in hermes.worker("decode-0").requests
    ]
    assert [s.get("maxItems") for s in schemas] == [16, 1, None]
    assert schemas[2] == TOOLS[0]["function"]["parameters"]
    wanted = schemas[0]["items"]["anyOf"][0]["properties"]
    assert wanted == {"name": {"enum": ["get_weather"]}, "parameters": schemas[2]}


def test_definitions_go_to_the_root_of_the_grammar():
    def tool(name: str, definition: dict) -> dict:
        parameters = {
            "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": definition},
        }  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    same = [tool("f", {"type": "string"}), tool("g", {"type": "string"})]
    schema = json.loads(parse_tools(same, "required").grammar(True).value)
    assert schema["$defs"] == {"A": {"type": "string"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    other = [same[0], tool("g", {"type": "number"})]
    with pytest.raises(RequestError, match="'A'"):
        parse_tools(other, "required").grammar(True)


BAD = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": TOOLS * 100}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
     "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
]  # fmt: skip


async def test_bad_tools_are_refused_by_name(hermes):
    """V30, V78."""
    for fields, param in BAD:
        response = await hermes.post(CHAT, messages=HI, **fields)
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert param.startswith(error["param"]) and error["param"].startswith(param[:5])
    assert not hermes.worker("prefill-0").requests


async def test_a_model_without_tools_says_so(router):
    response = await router.post(CHAT, messages=HI, tools=TOOLS)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


def test_the_configured_parser_wins():
    template = ChatTemplate("{{ tools }}")
    assert ChatReading.of(template, "auto", None).tool_format is None
    assert ChatReading.of(template, "mistral", None).tool_format.name == "mistral"
    assert ChatReading.of(None, "auto", "qwen3").reasoning == "qwen3"


async def test_the_official_client(hermes):
    """V36: its accumulating stream gives the message that it gets whole."""
    async with openai.AsyncOpenAI(
        base_url=f"{hermes.url}/v1", api_key="none", max_retries=0
    ) as client:
        whole = await client.chat.completions.create(model="fake", messages=HI, tools=TOOLS)
        async with client.chat.completions.stream(model="fake", messages=HI, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
    for answer in (whole, final):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Sure."
        assert [c.function.name for c in choice.message.tool_calls] == ["get_weather", "f"]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}
