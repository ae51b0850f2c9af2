"""The public gRPC API."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc, worker_pb2
from rpc.channel import make_channel
from support.fake_answers import answer_text
from support.router import running
from support.waiting import eventually


@pytest.fixture
async def channel(router):
    async with make_channel(f"127.0.0.1:{router.server.grpc_port}") as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


async def collect(call) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def test_generate(stub, router):
    request = pb.GenerateRequest(
        model="fake", prompt="hello", max_tokens=4, temperature=0, logprobs=2, n=2
    )
    messages = await collect(stub.Generate(request))
    for index in (0, 1):
        own = [m for m in messages[:-1] if m.index == index]
        assert "".join(m.text for m in own) == answer_text("hello", 4)
        assert [m.finish_reason for m in own] == ["", "", "", "length"]
        logprobs = [entry for m in own for entry in m.logprobs]
        assert [entry.logprob for entry in logprobs] == [-0.5, -1.5, -2.5, -3.5]
        assert [len(entry.top) for entry in logprobs] == [2] * 4
    assert messages[-1].usage.prompt_tokens == 5
    assert messages[-1].usage.completion_tokens == 8
    await router.idle()


async def test_prompt_forms(stub, router):
    ids = pb.TokenIds(ids=list(b"hello"))
    by_ids = pb.GenerateRequest(model="fake", prompt_token_ids=ids, max_tokens=3, temperature=0)
    messages = await collect(stub.Generate(by_ids))
    assert "".join(m.text for m in messages) == answer_text("hello", 3)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    by_chat = pb.GenerateRequest(model="fake", chat=chat, max_tokens=3, temperature=0)
    messages = await collect(stub.Generate(by_chat))
    assert "".join(m.text for m in messages) == answer_text("user: hi\nassistant:", 3)
    largest = pb.GenerateRequest(model="fake", prompt="x", max_tokens=1, seed=2**64 - 1)
    await collect(stub.Generate(largest))
    assert router.worker("prefill-0").requests[-1].sampling.seed == 2**64 - 1


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other", "prompt": "x"}, grpc.StatusCode.NOT_FOUND),
        ({"model": "fake"}, INVALID),
        ({"model": "fake", "prompt": ""}, INVALID),
        ({"model": "fake", "prompt": "x", "n": 0}, INVALID),
        ({"model": "fake", "prompt": "x", "stop": ["a"] * 5}, INVALID),
        ({"model": "fake", "prompt": "x", "logit_bias": {999: 1}}, INVALID),
        ({"model": "fake", "prompt": "x", "temperature": float("nan")}, INVALID),
    ],
)
async def test_errors_are_status_codes_with_details(stub, fields, code):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(stub.Generate(pb.GenerateRequest(**fields)))
    assert error.value.code() is code and error.value.details()


async def test_cancelling_aborts_both_legs(stub, router):
    decode = router.worker("decode-0")
    decode.gate = asyncio.Semaphore(0)
    call = stub.Generate(pb.GenerateRequest(model="fake", prompt="hello", max_tokens=8))
    await call.read()
    call.cancel()
    await router.idle()
    assert decode.num_cancelled == 1


async def test_a_deadline_aborts_both_legs(stub, router):
    router.worker("decode-0").gate = asyncio.Semaphore(0)
    request = pb.GenerateRequest(model="fake", prompt="hello", max_tokens=8)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(stub.Generate(request, timeout=0.3))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.idle()


async def test_models_health_and_reflection(stub, channel, router):
    models = await stub.Models(pb.ModelsRequest())
    assert [(m.id, m.max_model_len) for m in models.models] == [("fake", 4096)]
    health = health_pb2_grpc.HealthStub(channel)

    async def status(service: str) -> int:
        return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

    assert await status("") == health_pb2.HealthCheckResponse.SERVING
    assert await status("pdserve.v1.Inference") == health_pb2.HealthCheckResponse.SERVING
    router.cluster.set_state("decode-0", worker_pb2.WORKER_STATE_DRAINING)
    await eventually(lambda: not router.server.registry.can_serve())
    while await status("pdserve.v1.Inference") != health_pb2.HealthCheckResponse.NOT_SERVING:
        await asyncio.sleep(0.01)
    assert await status("") == health_pb2.HealthCheckResponse.SERVING
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [a async for a in reflect.ServerReflectionInfo(iter([question]))]
    names = {s.name for s in answers[0].list_services_response.service}
    assert {"pdserve.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_overload():
    async with (
        running("router.max_concurrent_requests=1") as router,
        make_channel(f"127.0.0.1:{router.server.grpc_port}") as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stub.Generate(pb.GenerateRequest(model="fake", prompt="x", n=2)))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        router.worker("decode-0").gate = asyncio.Semaphore(0)
        first = stub.Generate(pb.GenerateRequest(model="fake", prompt="x"))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stub.Generate(pb.GenerateRequest(model="fake", prompt="x")))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await router.idle()
