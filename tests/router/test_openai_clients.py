"""The official client, synchronous and asynchronous, against a router with fake workers."""

import asyncio

import openai
import pydantic
import pytest

from core.errors import EngineError
from support.byte_tokenizer import byte_tokenizer
from support.fake_answers import answer_text, says
from support.fake_workers import Fault
from support.router import running

HI = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant:"


@pytest.fixture
async def client(router):
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_completions(client):
    answer = await client.completions.create(
        model="fake", prompt="hello", max_tokens=4, temperature=0, logprobs=1
    )
    assert answer.choices[0].text == answer_text("hello", 4)
    assert len(answer.choices[0].logprobs.token_logprobs) == 4
    assert answer.usage.total_tokens == 9
    stream = await client.completions.create(
        model="fake", prompt="hello", max_tokens=4, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == answer.choices[0].text
    assert chunks[-1].usage == answer.usage


async def test_chat(client):
    answer = await client.chat.completions.create(
        model="fake", messages=HI, max_completion_tokens=4, temperature=0, n=2, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    assert [c.message.content for c in answer.choices] == [answer_text(PROMPT, 4)] * 2
    assert [len(e.top_logprobs) for e in answer.choices[0].logprobs.content] == [2] * 4
    async with client.chat.completions.stream(
        model="fake", messages=HI, temperature=0, stop=answer_text(PROMPT, 6)[4:]
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == answer_text(PROMPT, 4)
    assert final.choices[0].finish_reason == "stop"


async def test_models_and_errors(client):
    assert [model.id async for model in client.models.list()] == ["fake"]
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="fake", messages=HI, temperature=3)
    assert refused.value.param == "temperature"


async def test_failures_raise():
    """V26: before the first byte a status, after it an error event; never a short success."""
    async with running("router.max_attempts=1") as router:
        decode = router.worker("decode-0")
        decode.next_fault = lambda: Fault("error", 2, EngineError("broken"))
        async with openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model="fake", prompt="hello", max_tokens=8)
            stream = await client.chat.completions.create(
                model="fake", messages=HI, max_tokens=8, stream=True
            )
            with pytest.raises(openai.APIError, match="broken"):
                async for _ in stream:
                    pass
        await router.idle()


async def test_closing_a_stream_aborts_it(client, router):
    decode = router.worker("decode-0")
    decode.gate = asyncio.Semaphore(1)
    stream = await client.completions.create(
        model="fake", prompt="hello", max_tokens=8, stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    await router.idle()
    assert decode.num_cancelled == 1


async def test_sync_client(router):
    def talk() -> tuple[str, str]:
        with openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            answer = client.completions.create(
                model="fake", prompt="hello", max_tokens=4, temperature=0
            )
            stream = client.chat.completions.create(
                model="fake", messages=HI, max_tokens=4, temperature=0, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return answer.choices[0].text, text

    assert await asyncio.to_thread(talk) == (answer_text("hello", 4), answer_text(PROMPT, 4))


async def test_parse_and_the_streaming_helper_with_tools():
    """Structured output and tool calls as the client's own classes, whole and streamed."""

    class Point(pydantic.BaseModel):
        x: int
        y: int

    template = "Use <tool_call>.{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    call = '<tool_call>{"name": "Point", "arguments": {"x": 1, "y": -2}}</tool_call>'
    async with (
        running(tokenizer=byte_tokenizer(template)) as router,
        openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):

        def make_all_say(text: str) -> None:
            for worker in router.cluster.everyone:
                worker.script = says(text)

        make_all_say('{"x": 1, "y": -2}')
        asked = {"model": "fake", "messages": HI}
        parsed = await client.chat.completions.parse(**asked, response_format=Point)
        assert parsed.choices[0].message.parsed == Point(x=1, y=-2)
        async with client.chat.completions.stream(**asked, response_format=Point) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Point(x=1, y=-2)
        make_all_say(call)
        tools = [openai.pydantic_function_tool(Point)]
        parsed = await client.chat.completions.parse(**asked, tools=tools)
        assert parsed.choices[0].finish_reason == "tool_calls"
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Point(x=1, y=-2)
        async with client.chat.completions.stream(**asked, tools=tools) as stream:
            deltas = [
                event.arguments_delta async for event in stream
                if event.type == "tool_calls.function.arguments.delta"
            ]  # fmt: skip
            final = await stream.get_final_completion()
        assert "".join(deltas) == '{"x": 1, "y": -2}'
        (tool_call,) = final.choices[0].message.tool_calls
        assert tool_call.function.parsed_arguments == Point(x=1, y=-2)
