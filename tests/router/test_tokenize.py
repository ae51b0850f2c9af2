"""/tokenize and /detokenize, and the names of a request on its way."""

import re

import pytest

from support.byte_tokenizer import EOS, TEMPLATE, VOCAB_SIZE

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_there_and_back(router):
    body = (await router.http.post("/tokenize", json={"prompt": "hé", "model": "fake"})).json()
    assert body == {
        "count": 3, "max_model_len": 4096, "tokens": list("hé".encode()), "token_strs": None,
    }  # fmt: skip
    back = await router.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "hé"}
    assert (await router.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    strings = await router.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    assert strings.json()["token_strs"] == ["h", "\ufffd", "\ufffd"]


async def test_what_tools_must_know_of_the_tokenizer(router):
    body = (await router.http.get("/tokenizer_info")).json()
    assert body == {
        "bos_token": None, "eos_token": "<eos>", "vocab_size": VOCAB_SIZE,
        "model_max_length": 4096, "chat_template": TEMPLATE,
    }  # fmt: skip
    ends = await router.http.post("/tokenize", json={"prompt": body["eos_token"]})
    assert ends.json()["tokens"] == [EOS]


async def test_messages_are_rendered_as_a_chat_is(router):
    messages = [{"role": "user", "content": "hi"}]
    body = (await router.http.post("/tokenize", json={"messages": messages})).json()
    chat = await router.post(
        "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True
    )
    assert body["tokens"] == chat.json()["choices"][0]["prompt_token_ids"]
    fields = {"messages": messages, "add_generation_prompt": False}
    bare = (await router.http.post("/tokenize", json=fields)).json()
    assert bytes(bare["tokens"]) == b"user: hi\n"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400), ("/tokenize", {"prompt": "x", "messages": []}, 400),
        ("/tokenize", {"prompt": 5}, 400), ("/tokenize", {"prompt": "x", "model": "no"}, 404),
        ("/detokenize", {"tokens": [257]}, 400), ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "x"}, 400), ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [], "skip": 1}, 400),
    ],
)  # fmt: skip
async def test_what_is_refused(router, path, body, status):
    """V30."""
    response = await router.http.post(path, json=body)
    assert response.status_code == status and response.json()["error"]["param"]


async def test_request_id_and_trace_reach_both_workers(router):
    """V52: the client's own, or fresh ones; the same on both legs of an attempt."""
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    headers = {"x-request-id": "mine", "traceparent": TRACE}
    await router.http.post("/v1/completions", json=body, headers=headers)
    bad = await router.http.post("/v1/completions", json=body, headers={"traceparent": "00-0-0-0"})
    for worker in (router.worker("prefill-0"), router.worker("decode-0")):
        given, fresh = worker.metadata
        assert (given["x-request-id"], given["traceparent"]) == ("mine", TRACE)
        assert fresh["x-request-id"] == bad.headers["x-request-id"]
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", fresh["traceparent"])
    assert router.worker("prefill-0").metadata == [
        {**metadata, "user-agent": router.worker("prefill-0").metadata[0]["user-agent"]}
        for metadata in router.worker("decode-0").metadata
    ]
