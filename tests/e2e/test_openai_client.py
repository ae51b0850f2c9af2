"""The official client against a real deployment."""

from collections.abc import Callable

import openai
import pytest

from support.live import Live
from support.reference import logprobs

MODEL = "smollm2-135m"


@pytest.fixture
def client(live: Callable[[str], Live], kind: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live(kind).url}/v1", api_key="none", max_retries=0)


pytestmark = pytest.mark.parametrize("kind", ("nixl",))


def test_completion_and_stream_agree(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**fields)
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert all(reason is None for reason in reasons[:-1])


def test_chat_and_stream_agree(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Say hello in French."}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=24
    )
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=24, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert len(text) > 3


def test_n_choices_are_distinct_and_reproducible(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "My favourite animal is", "n": 3, "seed": 7}
    first = client.completions.create(**fields, temperature=1.0, max_tokens=12)
    second = client.completions.create(**fields, temperature=1.0, max_tokens=12)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]


def test_every_token_has_its_logprob(client: openai.OpenAI) -> None:
    """V18: the first token is sampled on another worker than the rest."""
    answer = client.completions.create(
        model=MODEL,
        prompt="The quick brown fox",
        temperature=0,
        max_tokens=6,
        logprobs=5,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = answer.choices[0]
    prompt_ids = choice.model_extra["prompt_token_ids"]
    ids = choice.model_extra["token_ids"]
    reference = logprobs([*prompt_ids, *ids])
    assert len(choice.logprobs.token_logprobs) == len(ids) == 6
    for i, (token_id, value) in enumerate(zip(ids, choice.logprobs.token_logprobs, strict=True)):
        expected = reference[len(prompt_ids) + i - 1, token_id].item()
        assert value == pytest.approx(expected, abs=1e-3)
        best = sorted(choice.logprobs.top_logprobs[i].values(), reverse=True)
        expected_best = reference[len(prompt_ids) + i - 1].topk(5).values.tolist()
        assert best == pytest.approx(expected_best, abs=1e-3)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count to three."}],
        max_tokens=5,
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=3,
    )
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert len(entries) == 5
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        text = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
        assert text.startswith(choice.message.content[:3])


def test_errors_are_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="no-such-model", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.completions.create(model=MODEL, prompt="x", suffix="y")
    assert unsupported.value.param == "suffix"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


async def test_async_client_streams_in_parallel(live: Callable[[str], Live], kind: str) -> None:
    import asyncio

    cluster = live(kind)
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def one(i: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=f"Number {i} is", max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*[one(i) for i in range(6)])
        alone = [await one(i) for i in range(6)]
    assert together == alone
    cluster.wait_idle()
