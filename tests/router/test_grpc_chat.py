"""The Chat stream of the public gRPC API: deadlines, errors, and the example of the docs."""

import asyncio
import json
import sys
from pathlib import Path

import grpc
import pytest

from router.request.pipeline import Waits
from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc, worker_pb2
from rpc.channel import make_channel
from rpc.codec import request_from_pb
from support.byte_tokenizer import byte_tokenizer
from support.fake_answers import answer_text, says
from support.router import Running, running
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}Use <tool_call>.\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
TOOL = pb.Tool(
    name="get_weather",
    description="of a city",
    parameters_json='{"type": "object", "properties": {"city": {"type": "string"}}}',
)
HI = [pb.ChatMessage(role="user", content="hi")]


@pytest.fixture
async def thinker():
    """A model with tools and reasoning."""
    async with running("router.reasoning_parser=qwen3", tokenizer=byte_tokenizer(TEMPLATE)) as it:
        yield it


def make_all_say(router: Running, text: str) -> None:
    for worker in router.cluster.everyone:
        worker.script = says(text)


async def chat(router: Running, timeout: float | None = None, **fields) -> list[pb.ChatResponse]:
    address = f"127.0.0.1:{router.server.grpc_port}"
    async with make_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        fields = {"model": "fake", "messages": HI, **fields}
        call = stub.Chat(pb.ChatRequest(**fields), timeout=timeout)
        return [message async for message in call]


async def test_a_chat_is_a_stream(router):
    messages = await chat(router, max_tokens=4, temperature=0, n=2, logprobs=2)
    for index in (0, 1):
        own = [m for m in messages[:-1] if m.index == index]
        text = "".join(m.content for m in own)
        assert text == answer_text("user: hi\nassistant:", 4)
        assert [m.finish_reason for m in own] == ["", "", "", "length"]
        assert [len(entry.top) for m in own for entry in m.logprobs] == [2] * 4
        assert bytes(i for m in own for i in m.token_ids).decode() == text
    assert messages[-1].usage.completion_tokens == 8
    await router.idle()
    metrics = (await router.http.get("/metrics")).text
    assert 'api="grpc_chat",outcome="ok"} 1.0' in metrics


async def test_reasoning_content_and_calls_come_apart(thinker):
    make_all_say(
        thinker,
        '<think>Hm.</think>Sure.<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}'
        "</tool_call>",
    )
    messages = await chat(thinker, tools=[TOOL], temperature=0)
    assert "".join(m.reasoning_content for m in messages) == "Hm."
    assert "".join(m.content for m in messages) == "Sure."
    calls = [call for m in messages for call in m.tool_calls]
    assert [call.name for call in calls if call.name] == ["get_weather"]
    assert calls[0].id and {call.index for call in calls} == {0}
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Köln"}
    assert [m.finish_reason for m in messages if m.finish_reason] == ["tool_calls"]
    replayed = [
        *HI,
        pb.ChatMessage(
            role="assistant",
            content="Sure.",
            reasoning_content="Hm.",
            tool_calls=[pb.ToolCall(id="c", name="get_weather", arguments='{"city": "Köln"}')],
        ),
        pb.ChatMessage(role="tool", tool_call_id="c", content="21 C"),
    ]
    await chat(thinker, messages=replayed, enable_thinking=True)
    prompt = bytes(thinker.worker("prefill-0").requests[-1].prompt_token_ids).decode()
    assert prompt == '[user]hi[assistant](Hm.)Sure.<get_weather {"city": "Köln"}>[tool]21 C<think>'


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"tool_mode": pb.TOOL_MODE_REQUIRED}, worker_pb2.GRAMMAR_KIND_JSON_SCHEMA),
        ({"function": "get_weather"}, worker_pb2.GRAMMAR_KIND_JSON_SCHEMA),
        ({"tool_mode": pb.TOOL_MODE_AUTO}, worker_pb2.GRAMMAR_KIND_UNSPECIFIED),
        ({"tool_mode": pb.TOOL_MODE_UNSPECIFIED}, worker_pb2.GRAMMAR_KIND_UNSPECIFIED),
    ],
)
async def test_the_choice_of_a_tool(thinker, choice, kind):
    await chat(thinker, tools=[TOOL], max_tokens=2, **choice)
    request = thinker.worker("prefill-0").requests[0]
    assert request.sampling.grammar.kind == kind
    assert b"get_weather" in bytes(request.prompt_token_ids)


async def test_no_tools_for_none(thinker):
    await chat(thinker, tools=[TOOL], tool_mode=pb.TOOL_MODE_NONE, max_tokens=2)
    assert bytes(thinker.worker("prefill-0").requests[0].prompt_token_ids) == b"[user]hi"


async def test_every_field_reaches_the_workers(router):
    fields = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.125, "presence_penalty": 1.0,
        "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {65: 3.0},
        "min_tokens": 2, "seed": 2**64 - 1, "max_tokens": 5,
    }  # fmt: skip
    await chat(router, **fields, stop=["zz"], cache_salt="s", regex="a+")
    request = request_from_pb(router.worker("prefill-0").requests[0])
    for name, value in fields.items():
        assert getattr(request.sampling, name) == value, name
    assert request.cache_salt == "s"
    assert request.sampling.grammar is not None and request.sampling.grammar.value == "a+"


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"messages": []}, INVALID, "messages"),
        ({"messages": [pb.ChatMessage(role="robot")]}, INVALID, "messages[0].role"),
        ({"max_tokens": 10**6}, INVALID, "max_tokens"),
        ({"tool_mode": pb.TOOL_MODE_REQUIRED}, INVALID, "tool_choice"),
        ({"tool_mode": 9}, INVALID, "tool_mode"),
        ({"tools": [pb.Tool(name="f", parameters_json="{")]}, INVALID, "tools[0].parameters_json"),
        ({"tools": [pb.Tool(name="a b")]}, INVALID, "tools[0].function.name"),
    ],
)
async def test_errors_name_the_field_in_trailing_metadata(router, fields, code, param):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await chat(router, **fields)
    assert error.value.code() is code and error.value.details()
    assert dict(error.value.trailing_metadata())["pdserve-param"] == param
    assert not router.worker("prefill-0").requests


@pytest.mark.parametrize("slow", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_a_deadline_frees_both_workers(router, slow, method):
    """Before the first token and after it: neither worker holds anything when it has passed."""
    router.worker(slow).gate = asyncio.Semaphore(0)
    request = {
        "Generate": pb.GenerateRequest(model="fake", prompt="hello", max_tokens=8),
        "Chat": pb.ChatRequest(model="fake", messages=HI, max_tokens=8),
    }[method]
    async with make_channel(f"127.0.0.1:{router.server.grpc_port}") as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)(request, timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in call:
                pass
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.idle()
    assert all(not worker.held for worker in router.cluster.everyone)
    assert router.worker(slow).num_cancelled == 1
    metrics = (await router.http.get("/metrics")).text
    api = {"Generate": "grpc", "Chat": "grpc_chat"}[method]
    assert f'api="{api}",outcome="cancelled"}} 1.0' in metrics


async def test_a_deadline_while_no_pair_can_take_it():
    async with running(waits=Waits(first_s=30.0, again_s=5.0)) as router:
        router.cluster.set_state("decode-0", worker_pb2.WORKER_STATE_DRAINING)
        await eventually(lambda: not router.server.registry.can_serve())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await chat(router, timeout=0.2)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await router.idle()


async def test_the_example_of_the_docs(router):
    make_all_say(router, "Rhine, Elbe.")

    async def example(*args: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "docs/examples/grpc_chat.py",
            "--address", f"127.0.0.1:{router.server.grpc_port}", *args,
            cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode or 0, out.decode(), err.decode()

    rc, out, err = await example("Name two rivers.")
    assert (rc, out) == (0, "Rhine, Elbe.\n[stop]\n[13 tokens]\n"), err
    rc, _, err = await example("x", "--max-tokens", "1000000")
    assert rc == 1 and "INVALID_ARGUMENT" in err and "'pdserve-param': 'max_tokens'" in err
