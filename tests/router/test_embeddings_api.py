"""/v1/embeddings: shapes, bounds, refusals, and what a failure or a client that leaves does."""

import asyncio
import base64
import math

import numpy as np
import openai
import pytest

from core.errors import EngineError
from rpc import worker_pb2
from support.fake_answers import BLOCK_SIZE
from support.fake_workers import Fault
from support.router import Running, running
from support.waiting import eventually

PATH = "/v1/embeddings"


@pytest.fixture
async def served():
    async with running("router.embeddings=mean") as it:
        yield it


def unit(prompt: list[int], pooling: int = worker_pb2.POOLING_MEAN) -> list[float]:
    """What the fake workers' vector is, at length one."""
    vector = [len(prompt), sum(prompt), pooling]
    return [value / math.hypot(*vector) for value in vector]


def vectors(body: dict) -> list[list[float]]:
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return [entry["embedding"] for entry in body["data"]]


async def embed(router: Running, inputs: object, **fields: object) -> dict:
    response = await router.post(PATH, input=inputs, **fields)
    assert response.status_code == 200, response.text
    await router.idle()
    return response.json()


@pytest.mark.parametrize(
    ("inputs", "prompts"),
    [
        ("hello", [b"hello"]),
        (["hello", "hé"], [b"hello", "hé".encode()]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [104]], [b"hi", b"h"]),
    ],
)
async def test_every_form_of_input(served, inputs, prompts):
    body = await embed(served, inputs)
    for got, prompt in zip(vectors(body), prompts, strict=True):
        assert got == pytest.approx(unit(list(prompt)))
    total = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert body["object"] == "list" and body["model"] == "fake"
    assert not served.worker("decode-0").requests
    assert [r.sampling.max_tokens for r in served.worker("prefill-0").requests] == [0] * len(
        prompts
    )


async def test_base64_is_the_same_in_float32(served):
    plain = vectors(await embed(served, "hello"))[0]
    packed = vectors(await embed(served, "hello", encoding_format="base64"))[0]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain


async def test_the_official_client(served):
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        answer = await client.embeddings.create(model="fake", input=["a", "bc"])
        assert answer.data[1].embedding == pytest.approx(unit(list(b"bc")))
        assert answer.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError) as error:
            await client.embeddings.create(model="fake", input="a", dimensions=2)
        assert error.value.param == "dimensions"


async def test_many_inputs_go_a_few_at_a_time_and_stay_in_order(served):
    prefill = served.worker("prefill-0")
    most = 0

    def pause() -> float:
        nonlocal most
        most = max(most, prefill.active)
        return 0.0

    prefill.pause = pause
    inputs = [[1 + i % 200] * (1 + i % 5) for i in range(150)]
    for got, prompt in zip(vectors(await embed(served, inputs)), inputs, strict=True):
        assert got == pytest.approx(unit(prompt))
    assert 1 < most <= 16


async def test_the_last_token_and_a_colocated_worker():
    """The prefix cache may serve all but the last token, and usage says so in metrics."""
    async with running("router.embeddings=last", colocated=1, prefills=0, decodes=0) as router:
        prompt = list(range(1, 3 * BLOCK_SIZE))
        for _ in range(2):
            body = await embed(router, prompt, cache_salt="s")
            assert vectors(body)[0] == pytest.approx(unit(prompt, worker_pb2.POOLING_LAST))
        request = router.worker("colocated-0").requests[1]
        assert request.cache_salt == "s"
        metrics = (await router.http.get("/metrics")).text
        assert f"pdserve_prefix_cache_hit_tokens_total {2.0 * BLOCK_SIZE}" in metrics
        assert 'api="embeddings",outcome="ok"} 2.0' in metrics


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": 3}, "input"),
        ({}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 64}, "dimensions"),
        ({"input": "x", "foo": 1}, "foo"),
    ],
)
async def test_what_is_refused_and_in_which_name(served, fields, param):
    response = await served.post(PATH, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not served.worker("prefill-0").requests


async def test_not_served_unless_asked_for(router):
    response = await router.post(PATH, input="x")
    assert response.status_code == 404
    assert "router.embeddings" in response.json()["error"]["message"]
    unknown = await router.post(PATH, model="other", input="x")
    assert unknown.status_code == 404


async def test_another_worker_is_tried_and_the_last_failure_is_told():
    async with running("router.embeddings=mean", prefills=2) as router:
        faults = iter([Fault("error", 0, EngineError("broken"))])
        for worker in router.cluster.everyone:
            worker.next_fault = lambda: next(faults, None)
        body = await embed(router, "hello")
        assert vectors(body)[0] == pytest.approx(unit(list(b"hello")))
        for worker in router.cluster.everyone:
            worker.next_fault = lambda: Fault("error", 0, EngineError("broken"))
        response = await router.post(PATH, input=["a", "b", "c"])
        assert response.status_code == 500 and "broken" in response.json()["error"]["message"]
        await router.idle()


async def test_a_client_that_leaves_cancels_all_of_them(served):
    prefill = served.worker("prefill-0")
    prefill.gate = asyncio.Semaphore(0)
    post = asyncio.create_task(served.post(PATH, input=["x"] * 40))
    await eventually(lambda: prefill.active == 16)
    post.cancel()
    await served.idle()
    assert len(prefill.requests) == 16
    metrics = (await served.http.get("/metrics")).text
    assert 'api="embeddings",outcome="cancelled"} 1.0' in metrics
