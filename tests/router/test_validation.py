"""What is refused, with which status, and that it never reaches a worker."""

import json

import httpx

from support.fake_answers import answer_text
from support.router import Running, running

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and isinstance(body["error"]["type"], str)
    if param is not None:
        assert (body["error"]["param"] or "").startswith(param), body
    return body["error"]


async def check_untouched(router: Running) -> None:
    """No worker heard of it, and the next request is served."""
    assert all(not worker.requests for worker in router.cluster.everyone)
    assert (await router.complete("hello", max_tokens=2))["choices"][0]["text"] == answer_text(
        "hello", 2
    )


BAD_FIELDS = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"),
    ("max_tokens", 10**9), ("max_tokens", True),
    ("temperature", 2.1), ("temperature", -0.1), ("temperature", "1"),
    ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("min_p", 1.1), ("min_p", -0.1),
    ("n", 0), ("n", -1), ("n", 129), ("n", 10**6),
    ("seed", 2**63), ("seed", "x"),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("repetition_penalty", 11),
    ("logit_bias", {"AI": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"257": 1}),
    ("logit_bias", {"1": 1e9}), ("logit_bias", {"1": "x"}), ("logit_bias", {"١": 1}),
    ("logit_bias", [1]), ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("stop", ["a"] * 5), ("stop", ""), ("stop", ["a", ""]), ("stop", "x" * 1025), ("stop", [1]),
    ("stop", ["x"] * 500_000),
    ("stop_token_ids", [257]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 129),
    ("min_tokens", -1), ("min_tokens", 17),
    ("stream", "yes"), ("stream_options", {"include_usage": True}), ("stream_options", 1),
    ("cache_salt", 5), ("cache_salt", "x" * 300), ("user", 5), ("model", 5),
]  # fmt: skip


async def test_bad_values_are_refused_by_name(router):
    """V34, V41, V75: on both routes, before any worker."""
    for name, value in BAD_FIELDS:
        fields = {"max_tokens": 16, name: value}
        check_error(await router.post(prompt="x", **fields), 400, name)
        check_error(await router.post(CHAT, messages=HI, **fields), 400, name)
    await check_untouched(router)


UNSUPPORTED = {
    "best_of": 2, "suffix": "x", "prompt_embeds": "AAAA",
    "chat_template": "{{ 1 }}", "functions": [{"name": "f"}],
    "use_beam_search": True, "bad_words": ["x"], "store": True,
    "continue_final_message": True, "reasoning_effort": "low", "modalities": ["audio"],
}  # fmt: skip
INTERNAL = {
    "kv_transfer_params": {"remote_host": "10.0.0.1"}, "request_id": "x", "output_token_ids": [1],
    "source": {"address": "1.2.3.4:5"}, "incarnation": "x", "hand_over": False, "bootstrap_room": 1,
    "block_ids": [1], "no_such_thing": 1,
}  # fmt: skip


async def test_unsupported_and_unknown_parameters_are_refused_by_name(router):
    """V76, V79: nothing is ignored in silence, and nothing internal is taken from outside."""
    for path, own in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": HI})):
        for name, value in UNSUPPORTED.items():
            error = check_error(await router.post(path, **own, **{name: value}), 400, name)
            assert error["message"] == f"{name} is not supported"
        for name, value in INTERNAL.items():
            error = check_error(await router.post(path, **own, **{name: value}), 400, name)
            assert error["message"] == f"Unrecognized request argument supplied: {name}"
    await check_untouched(router)


async def test_neutral_values_are_accepted(router):
    neutral = {
        "best_of": 1, "echo": False, "suffix": None, "tools": None, "logit_bias": None,
        "response_format": {"type": "text"}, "user": "me", "top_k": -1, "temperature": 0,
        "top_p": 0, "stop": None, "n": None, "stream": False, "max_tokens": 2, "logprobs": None,
    }  # fmt: skip
    response = await router.post(prompt="hello", **neutral)
    assert response.json()["choices"][0]["text"] == answer_text("hello", 2)
    for value in (1e-9, 2):
        assert (await router.post(prompt="x", temperature=value, max_tokens=1)).status_code == 200
    sent = router.worker("prefill-0").requests
    assert sent[1].sampling.temperature == 0 and sent[2].sampling.temperature == 2
    assert sent[0].sampling.top_p > 0 and sent[0].sampling.top_k == 0


BAD_PROMPTS = [
    "", [""], [], [[]], [["a"]], ["a", ""], [[1], []], [257], [-1], [1.5], [True], [1, "a"], None,
    5, {"a": 1}, [None], [["a"], "b"], ["a"] * 129, [[1]] * 100_000, 10**30, [10**30],
]  # fmt: skip


async def test_bad_prompts(router):
    """V32, V75."""
    for prompt in BAD_PROMPTS:
        error = check_error(await router.post(prompt=prompt), 400)
        assert error["param"] in ("prompt", "n"), str(prompt)[:80]
    await check_untouched(router)


async def test_whitespace_is_a_prompt(router):
    assert (await router.post(prompt=" ", max_tokens=1)).status_code == 200


BAD_MESSAGES = [
    [], None, "hi", [5], [{}], [{"role": "user"}], [{"role": "king", "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}],
    [{"role": "user", "content": [{"type": "input_audio"}]}],
]  # fmt: skip


async def test_bad_messages(router):
    """V30, V31, V77: nothing is fetched for a client."""
    for messages in BAD_MESSAGES:
        check_error(await router.post(CHAT, messages=messages), 400, "messages")
    await check_untouched(router)


async def test_chat_logprobs_need_each_other(router):
    check_error(await router.post(CHAT, messages=HI, top_logprobs=2), 400, "top_logprobs")
    check_error(
        await router.post(CHAT, messages=HI, logprobs=True, top_logprobs=21), 400, "top_logprobs"
    )
    check_error(await router.post(CHAT, messages=HI, top_logprobs=10**5, logprobs=True), 400)
    check_error(await router.post(prompt="x", logprobs=21), 400, "logprobs")


async def test_context_limit():
    """V41: the smallest limit of the ready workers; never a negative number of tokens."""

    def prepare(worker):
        worker.max_model_len = 32 if worker.role == "decode" else 64

    async with running(prepare=prepare) as router:
        assert (await router.post(prompt=[1] * 31, max_tokens=1)).status_code == 200
        defaulted = await router.post(prompt=[1] * 30)
        assert defaulted.json()["usage"]["completion_tokens"] == 2
        for length in (32, 33):
            error = check_error(await router.post(prompt=[1] * length), 400, "prompt")
            assert error["code"] == "context_length_exceeded"
        error = check_error(await router.post(prompt=[1] * 31, max_tokens=2), 400, "max_tokens")
        assert error["code"] == "context_length_exceeded"
        long = [{"role": "user", "content": "x" * 40}]
        assert check_error(await router.post(CHAT, messages=long), 400, "messages")


async def test_unknown_models(router):
    """V38."""
    for path, body in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": HI})):
        for model in ({}, {"model": ""}, {"model": "wrong"}):
            error = check_error(await router.http.post(path, json={**body, **model}), 404, "model")
            assert error["code"] == "model_not_found"


BAD_BODIES = [
    b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}',
    b'{"a": Infinity}',
     b'{"model": "fake", "prompt": "\\ud800"}', b"1" * 10_000, b"[" * 20_000,
     b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
     b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
]  # fmt: skip


async def test_bad_bodies(router):
    """V30, V44."""
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", CHAT):
        for content in BAD_BODIES:
            check_error(await router.http.post(path, content=content, headers=headers), 400)
    await check_untouched(router)


async def test_wrong_routes_methods_and_types(router):
    check_error(await router.http.get("/nowhere"), 404)
    check_error(await router.http.post("/v1/nothing"), 404)
    assert "POST" in (await router.http.get("/v1/completions")).headers["allow"]
    check_error(await router.http.get("/v1/completions"), 405)
    check_error(await router.http.post("/v1/models"), 405)
    check_error(await router.http.delete("/health"), 405)
    text = {"content-type": "text/plain"}
    check_error(await router.http.post("/v1/completions", content=b"{}", headers=text), 415)


async def test_large_bodies_are_refused_before_they_are_parsed():
    """V44: with and without a declared length."""
    async with running("router.max_body_bytes=100000") as router:
        body = json.dumps({"model": "fake", "prompt": "x" * 200_000}).encode()
        headers = {"content-type": "application/json"}
        check_error(await router.http.post("/v1/completions", content=body, headers=headers), 413)

        async def pieces():
            for start in range(0, len(body), 10_000):
                yield body[start : start + 10_000]

        check_error(
            await router.http.post("/v1/completions", content=pieces(), headers=headers), 413
        )
        big = b"x" * 30_000_000
        check_error(await router.http.post("/v1/completions", content=big, headers=headers), 413)
        await check_untouched(router)


async def test_large_headers_are_refused(router):
    response = await router.http.get("/health", headers={"x-large": "x" * 1_000_000})
    check_error(response, 400)
    many = {f"x-{i}": "y" * 100 for i in range(1000)}
    # 100 kB may fit into what was read at once, or not; either way it is bounded.
    assert (await router.http.get("/health", headers=many)).status_code in (200, 400)
    assert (await router.http.get("/health")).status_code == 200


async def test_validation_comes_before_the_stream(router):
    """V40: a bad request that wants a stream gets a status, not an event."""
    response = await router.post(prompt="x", n=0, stream=True)
    check_error(response, 400, "n")
    assert response.headers["content-type"] == "application/json"


async def test_the_openapi_document_lists_every_field(router):
    document = (await router.http.get("/openapi.json")).json()
    operation = document["paths"]["/v1/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_tokens", "ignore_eos", "stream_options"} <= set(schema["properties"])
    assert schema["properties"]["model"] == {"type": "string", "enum": ["fake"]}
    bodies = [path["post"] for path in document["paths"].values() if "post" in path]
    assert len(bodies) >= 4 and "$ref" not in json.dumps([body["requestBody"] for body in bodies])
