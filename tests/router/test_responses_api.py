"""/v1/responses: with the official client, and what is on the wire."""

import json
from collections.abc import Iterator
from itertools import pairwise

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from core.errors import EngineError
from router.chat.output import ReadingPlan
from router.chat.tool_formats import FORMATS
from router.openai.response_body import chat_of, parse_response
from router.openai.response_format import ResponseFormatter
from router.request.generation import Delta, TextRequest, Usage
from rpc import worker_pb2
from support.byte_tokenizer import byte_tokenizer
from support.fake_answers import answer_text, says
from support.fake_workers import Fault
from support.router import Running, running

PATH = "/v1/responses"
PROMPT = "user: hello\nassistant:"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}Use <tool_call>.\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
)
TOOL = {
    "type": "function", "name": "get_weather", "strict": False, "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
THINKS_AND_CALLS = (
    "<think>Let me see.</think>\nSure.\n"
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
)


@pytest.fixture
async def client(router):
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def thinker():
    """A model with tools and reasoning."""
    async with running("router.reasoning_parser=qwen3", tokenizer=byte_tokenizer(TEMPLATE)) as it:
        make_all_say(it, THINKS_AND_CALLS)
        yield it


def make_all_say(router: Running, text: str) -> None:
    for worker in router.cluster.everyone:
        worker.script = says(text)


def events_of(text: str) -> list[dict]:
    """The events of a stream; each is named twice, and numbered."""
    events = []
    for piece in text.split("\n\n")[:-1]:
        first, second = piece.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    assert text.endswith("\n\n")
    return events


async def test_text_whole_and_streamed(client, router):
    answer = await client.responses.create(
        model="fake", input="hello", max_output_tokens=4, temperature=0, metadata={"a": "b"}
    )
    assert answer.output_text == answer_text(PROMPT, 4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.usage.input_tokens == len(PROMPT) and answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == len(PROMPT) + 4
    assert answer.metadata == {"a": "b"} and answer.store is False
    Response.model_validate(answer.to_dict())
    make_all_say(router, "Hello.")
    async with client.responses.stream(model="fake", input="hello") as stream:
        texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == "Hello." and len(texts) == 6
    assert final.status == "completed" and final.output[0].status == "completed"
    await router.idle()


async def test_the_events_of_a_text(router):
    make_all_say(router, "Hi")
    response = await router.post(PATH, input="hello", stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None and events[0]["response"]["output"] == []
    item = events[2]["item"]
    assert item["content"] == [] and item["role"] == "assistant"
    assert {e.get("item_id", item["id"]) for e in events[3:8]} == {item["id"]}
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert final["output"][0]["content"][0]["text"] == "Hi" == events[6]["text"]
    assert final["id"] == events[0]["response"]["id"]


async def test_parse(client, router):
    class Point(BaseModel):
        x: int
        y: int

    make_all_say(router, '{"x": 1, "y": -2}')
    answer = await client.responses.parse(model="fake", input="where?", text_format=Point)
    assert answer.output_parsed == Point(x=1, y=-2)
    grammar = router.worker("prefill-0").requests[0].sampling.grammar
    assert grammar.kind == worker_pb2.GRAMMAR_KIND_JSON_SCHEMA
    assert json.loads(grammar.value)["required"] == ["x", "y"]
    async with client.responses.stream(model="fake", input="where?", text_format=Point) as stream:
        assert (await stream.get_final_response()).output_parsed == Point(x=1, y=-2)


async def test_reasoning_text_and_calls_are_items(thinker):
    """V36, for this API."""
    fields = {"input": "hi", "tools": [TOOL], "temperature": 0}
    body = (await thinker.post(PATH, **fields)).json()
    assert body["status"] == "completed"
    Response.model_validate(body)
    reasoning, message, first, second = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "Sure."
    assert json.loads(first["arguments"]) == {"city": "Köln"} and first["name"] == "get_weather"
    assert json.loads(second["arguments"]) == {"city": "Bonn"}
    assert first["call_id"] != second["call_id"]
    assert body["tools"] == [TOOL]
    thoughts = len("<think>Let me see.</think>\n")
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == thoughts
    async with (
        openai.AsyncOpenAI(base_url=f"{thinker.url}/v1", api_key="none") as client,
        client.responses.stream(model="fake", **fields) as stream,
    ):
        arguments: dict[int, str] = {}
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                old = arguments.get(event.output_index, "")
                arguments[event.output_index] = old + event.delta
        final = await stream.get_final_response()
    assert arguments == {2: first["arguments"], 3: second["arguments"]}
    assert plain(final.to_dict()["output"]) == plain(body["output"])


def plain(output: list[dict]) -> list[dict]:
    """Items without what differs from one response to the next, and the client's own field."""
    fresh = ("id", "call_id", "parsed_arguments")
    kept = [{k: v for k, v in item.items() if k not in fresh} for item in output]
    for item in kept:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return kept


async def test_what_was_answered_goes_back_in(thinker):
    """Own items, replayed, are one message of the assistant; then come the tool's answers."""
    said = (await thinker.post(PATH, input="hi", tools=[TOOL])).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": said[2]["call_id"], "output": "21 C"},
        {"type": "function_call_output", "call_id": said[3]["call_id"],
         "output": [{"type": "input_text", "text": "22 C"}]},
    ]  # fmt: skip
    question = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    items = [question, *said, *results]
    answer = await thinker.post(PATH, instructions="Be brief.", input=items, tools=[TOOL])
    assert answer.status_code == 200, answer.text
    prompt = bytes(thinker.worker("prefill-0").requests[-1].prompt_token_ids).decode()
    assert prompt.partition("Use <tool_call>.\n")[2].removeprefix("\n") == (
        "[system]Be brief.[user]hi[assistant](Let me see.)Sure."
        '<get_weather {"city": "Köln"}><get_weather {"city": "Bonn"}>[tool]21 C[tool]22 C'
    )


async def test_forced_calls_and_named_ones(thinker):
    make_all_say(thinker, '[{"name": "get_weather", "parameters": {}}]')
    body = (await thinker.post(PATH, input="x", tools=[TOOL], tool_choice="required")).json()
    assert [item["type"] for item in body["output"]] == ["function_call"]
    make_all_say(thinker, '{"city": "Bonn"}')
    named = {"type": "function", "name": "get_weather"}
    body = (await thinker.post(PATH, input="x", tools=[TOOL], tool_choice=named)).json()
    assert body["output"][0]["arguments"] == '{"city": "Bonn"}'
    assert body["tool_choice"] == named


async def test_logprobs_come_once_each(client, router):
    fields = {"model": "fake", "input": "hello", "max_output_tokens": 5, "temperature": 0}
    fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await client.responses.create(**fields)
    entries = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    stop = answer.output_text[3:5] + "!"  # what may be its beginning is held back
    stream = await client.responses.create(**fields, stream=True, extra_body={"stop": stop})
    events = [event async for event in stream]
    done = next(e for e in events if e.type == "response.output_text.done")
    assert [e.logprob for e in done.logprobs] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    sent = [e.logprob for event in events if event.type == "response.output_text.delta"
            for e in event.logprobs]  # fmt: skip
    assert sent == [-0.5, -1.5, -2.5, -3.5, -4.5]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
        ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata"),
        ({"input": "x" * 5000}, "input"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
         "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
         "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ],
)  # fmt: skip
async def test_what_is_refused_and_in_which_name(router, fields, param):
    """V30: a 400 in OpenAI's shape, before any worker hears of it."""
    response = await router.post(PATH, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert not router.worker("prefill-0").requests


async def test_asking_for_nothing_is_no_mistake(router):
    response = await router.post(
        PATH, input="x", store=False, previous_response_id=None, truncation="disabled",
        include=["reasoning.encrypted_content"], text={"format": {"type": "text"}},
        service_tier="auto", reasoning={}, max_output_tokens=1,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert (await router.http.get(f"{PATH}/resp_1")).status_code == 404


async def test_logprobs_do_not_go_with_reasoning(thinker):
    response = await thinker.post(PATH, input="x", top_logprobs=1)
    assert response.json()["error"]["param"] == "include"


async def test_a_failure_is_a_status_or_two_events():
    """V26, V40: before the first byte a status; after it response.failed, and the client
    raises."""
    async with running("router.max_attempts=1") as router:
        decode = router.worker("decode-0")
        decode.next_fault = lambda: Fault("error", 2, EngineError("broken"))
        response = await router.post(PATH, input="hello", max_output_tokens=8)
        assert response.status_code == 500
        events = events_of(
            (await router.post(PATH, input="hello", max_output_tokens=8, stream=True)).text
        )
        assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
        failed = events[-2]["response"]
        assert failed["status"] == "failed" and "broken" in failed["error"]["message"]
        assert failed["output"][0]["status"] == "incomplete"
        async with openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0
        ) as client:
            stream = await client.responses.create(
                model="fake", input="hello", max_output_tokens=8, stream=True
            )
            with pytest.raises(openai.APIError, match="broken"):
                async for _ in stream:
                    pass
        await router.idle()


def cuts(text: str) -> Iterator[list[str]]:
    """The text in pieces of several sizes."""
    for size in (1, 2, 3, 5, 7, 11, 13, 29, 60, len(text)):
        yield [text[i : i + size] for i in range(0, len(text), size)]


def test_items_are_the_same_however_the_text_was_cut():
    body = parse_response({"input": "x", "stream": True})
    names = frozenset({"get_weather"})
    plan = ReadingPlan(FORMATS["hermes"], names, reasoning="marked")
    sampling = None
    request = TextRequest(prompts=((1,),), sampling=sampling, reading=plan)  # type: ignore[arg-type]
    wanted = None
    text = THINKS_AND_CALLS + "\nand so on"
    for pieces in cuts(text):
        writer = ResponseFormatter(body, request, "fake", byte_tokenizer())
        sent = b""
        for position, piece in enumerate(pieces):
            reason = "stop" if position == len(pieces) - 1 else None
            sent += writer.chunk(Delta(0, piece, [1] * len(piece), None, reason))
        sent += writer.last_chunk(Usage(1, len(text)), None)
        events = events_of(sent.decode())
        output = plain(events[-1]["response"]["output"])
        wanted = wanted or output
        assert output == wanted
        for index, item in enumerate(output):
            said = "".join(
                e["delta"] for e in events if e["type"].endswith(".delta")
                and e["output_index"] == index
            )  # fmt: skip
            assert said == (item.get("arguments") or item["content"][0]["text"])
        indexes = [e["output_index"] for e in events if "output_index" in e]
        assert all(b - a in (0, 1) for a, b in pairwise(indexes))
    assert [item["type"] for item in wanted] == [
        "reasoning", "message", "function_call", "function_call", "message",
    ]  # fmt: skip


def test_every_shared_field_reaches_the_chat():
    fields = {
        "temperature": 0.5, "top_p": 0.5, "seed": 3, "stop": ["a"], "top_k": 4, "min_p": 0.1,
        "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5,
        "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [5], "cache_salt": "s",
        "structured_outputs": {"regex": "a"}, "user": "u", "stream": True, "priority": -3,
    }  # fmt: skip
    chat = chat_of(parse_response({"input": "x", "max_output_tokens": 7, **fields}))
    for name, value in fields.items():
        assert getattr(chat, name) == value, name
    assert chat.wanted_tokens == 7
    switched = parse_response({"input": "x", "chat_template_kwargs": {"enable_thinking": True}})
    switches = chat_of(switched).chat_template_kwargs
    assert switches is not None and switches.enable_thinking is True
