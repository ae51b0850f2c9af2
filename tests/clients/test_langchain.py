"""LangChain's ChatOpenAI against a live deployment."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from support.live import Live

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(description="name of the city", max_length=20)
    celsius: int = Field(ge=-50, le=50)


@pytest.fixture
def chat(server: Live) -> Callable[..., Any]:
    import langchain_openai

    def make(**fields: Any) -> Any:
        known = {"model": MODEL, "temperature": 0, "max_tokens": 48, "max_retries": 0}
        return langchain_openai.ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="none", **{**known, **fields}
        )

    return make


def get_weather(city: str) -> str:
    """The weather of a city, now."""
    return f"21 C in {city}"


@pytest.mark.parametrize("responses_api", [False, True])
def test_invoke_and_stream_agree(chat: Callable[..., Any], responses_api: bool) -> None:
    model = chat(use_responses_api=responses_api, stream_usage=True)
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    whole = None
    num_chunks = 0
    for chunk in model.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
        num_chunks += 1
    assert whole is not None and num_chunks > 3
    assert whole.text == answer.text
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


def test_conversations_batches_and_async(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=8)
    talk = [("system", "Be brief."), ("human", QUESTION), ("ai", "Paris."), ("human", "And of?")]
    one = model.invoke(talk)
    assert [m.text for m in model.batch([talk, talk])] == [one.text] * 2
    assert asyncio.run(model.ainvoke(talk)).text == one.text
    assert one.response_metadata["finish_reason"] in ("stop", "length")
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(talk)
    entries = scored.response_metadata["logprobs"]["content"]
    assert len(entries) == scored.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("responses_api", [False, True])
def test_bind_tools(chat: Callable[..., Any], responses_api: bool) -> None:
    """Forced calls have valid arguments, whole and streamed; the answer to one goes back in."""
    model = chat(use_responses_api=responses_api)
    for choice in ("any", "Weather"):
        bound = model.bind_tools([get_weather, Weather], tool_choice=choice)
        answer = bound.invoke("How warm is it in Paris?")
        assert answer.tool_calls, answer
        for call in answer.tool_calls:
            if call["name"] == "Weather":
                Weather.model_validate(call["args"])
            else:
                assert isinstance(call["args"]["city"], str)
        if choice == "Weather":
            assert [call["name"] for call in answer.tool_calls] == ["Weather"]
        whole = None
        for chunk in bound.stream("How warm is it in Paris?"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert [(c["name"], c["args"]) for c in whole.tool_calls] == [
            (c["name"], c["args"]) for c in answer.tool_calls
        ]
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "21 C"}
    after = model.bind_tools([Weather]).invoke([("human", "How warm?"), answer, result])
    assert after.text or after.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "responses"])
def test_structured_output(chat: Callable[..., Any], method: str) -> None:
    via_responses = method == "responses"
    model = chat(use_responses_api=via_responses, max_tokens=64).with_structured_output(
        Weather, method="json_schema" if via_responses else method
    )
    answer = model.invoke("It is 21 degrees in Paris.")
    assert isinstance(answer, Weather)


def test_json_mode(chat: Callable[..., Any]) -> None:
    """Any JSON object: a small model may not find its end, which the client calls an error."""
    model = chat(model_kwargs={"response_format": {"type": "json_object"}}, max_tokens=96)
    try:
        text = model.invoke("The city of Paris as a small JSON object.").text
        assert isinstance(json.loads(text), dict)
    except openai.LengthFinishReasonError as error:
        assert str(error.completion.choices[0].message.content).startswith("{")


def test_embeddings(server: Live) -> None:
    """Of texts, in base64, as they are sent by default; nearer for what means the same."""
    import langchain_openai

    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    cat, kitten, tax = embeddings.embed_documents(
        ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Tax law, section 12(b)."]
    )
    assert len(cat) == 576
    assert sum(x * x for x in cat) == pytest.approx(1.0, abs=1e-5)

    def nearness(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert nearness(cat, kitten) > nearness(cat, tax)
    assert embeddings.embed_query("A cat sleeps on the sofa.") == pytest.approx(cat, abs=1e-4)


def test_errors_are_those_of_the_api(chat: Callable[..., Any]) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(model="other").invoke("x")
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens"):
        chat().bind(max_tokens=0).invoke("x")
