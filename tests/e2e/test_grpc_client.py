"""The public gRPC API against a real deployment: a chat, and what a deadline and a cancel free."""

from collections.abc import Callable

import grpc
import pytest

from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc
from support.live import Live

MODEL = "smollm2-135m"
pytestmark = pytest.mark.parametrize("kind", ("nixl",))


def question(max_tokens: int, **fields: object) -> pb.ChatRequest:
    message = pb.ChatMessage(role="user", content="Tell me a long story about a river.")
    return pb.ChatRequest(
        model=MODEL, messages=[message], temperature=0, max_tokens=max_tokens, **fields
    )


def test_a_chat_and_what_ends_it_early(live: Callable[[str], Live], kind: str) -> None:
    """The same text as over HTTP; past a deadline, or cancelled, both workers are idle again."""
    cluster = live(kind)
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        said = "".join(message.content for message in stub.Chat(question(16), timeout=60))
        body = {
            "model": MODEL, "temperature": 0, "max_tokens": 16,
            "messages": [{"role": "user", "content": "Tell me a long story about a river."}],
        }  # fmt: skip
        whole = cluster.post("/v1/chat/completions", body).json()
        assert said == whole["choices"][0]["message"]["content"]
        with pytest.raises(grpc.RpcError) as error:
            for _ in stub.Chat(question(1500, ignore_eos=True), timeout=1.0):
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        cluster.wait_idle()
        call = stub.Chat(question(1500, ignore_eos=True), timeout=60)
        next(call)
        call.cancel()
        cluster.wait_idle()
