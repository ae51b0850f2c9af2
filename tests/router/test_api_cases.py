"""Public bug reports about OpenAI-style APIs, on every route that takes a body."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.http import request_body
from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc
from rpc.channel import make_channel
from support.byte_tokenizer import EOS
from support.fake_answers import BLOCK_SIZE, answer_text
from support.router import Running, running
from support.sse import events, is_done

HI = [{"role": "user", "content": "hi"}]
# Each route with the least that it takes.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
GENERATING = list(ROUTES)[:3]


@pytest.fixture
async def embedding_router():
    async with running("router.embeddings=last") as it:
        yield it


def check_error(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    assert response.status_code in statuses, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


async def test_every_route_is_listed(router):
    document = (await router.http.get("/openapi.json")).json()
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts == set(ROUTES)


ODD_VALUES = [True, -1, 1e300, "x", [[]], {"type": None}, [{"a": [1]}]]


async def test_odd_values_are_answered_or_a_400_in_the_envelope(embedding_router):
    """V30: every documented field of the routes whose values test_validation does not list; no
    5xx, and the next request is served."""
    router = embedding_router
    document = (await router.http.get("/openapi.json")).json()
    for path, least in list(ROUTES.items())[2:]:
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        limit = {"max_output_tokens": 1} if "max_output_tokens" in schema["properties"] else {}
        for name in set(schema["properties"]) - {"timings"}:
            bodies = [{**least, **limit, name: value} for value in ODD_VALUES]
            answers = await asyncio.gather(*(router.post(path, **body) for body in bodies))
            for body, answer in zip(bodies, answers, strict=True):
                if answer.status_code != 200:
                    error = check_error(answer, 400, 404)
                    assert error["type"] == "invalid_request_error", (path, body)
    await router.complete("hello", max_tokens=1)
    await router.idle()


async def test_bodies_that_are_no_request(embedding_router):
    """V30, V44: on each route, before anything is done with them."""
    nested = b"[" * 20_000 + b"]" * 20_000
    for path, least in ROUTES.items():
        body = json.dumps({"model": "fake", **least})[:-1].encode()
        for content in (b"", b"{", b"[]", b"null", body + b', "a": ' + nested + b"}"):
            headers = {"content-type": "application/json"}
            answer = await embedding_router.http.post(path, content=content, headers=headers)
            check_error(answer, 400)
        wrong = await embedding_router.http.post(path, content=body + b"}", headers={
            "content-type": "text/plain"})  # fmt: skip
        check_error(wrong, 415)
        check_error(await embedding_router.http.get(path), 405)
    assert all(not worker.requests for worker in embedding_router.cluster.everyone)


async def test_a_body_that_comes_too_slowly_is_a_408(router, monkeypatch):
    """V44."""
    monkeypatch.setattr(request_body, "READ_TIMEOUT_S", 0.2)

    async def slowly():
        yield b'{"model": "fake", '
        await asyncio.sleep(0.6)

    headers = {"content-type": "application/json"}
    answer = await router.http.post("/v1/responses", content=slowly(), headers=headers)
    check_error(answer, 408)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_that_is_not_served(embedding_router, path):
    """V38: wrong, empty, missing; the last is no mistake where no model is chosen."""
    may_be_left_out = path in ("/tokenize", "/detokenize")
    for model in ("wrong", "", None):
        body = {**ROUTES[path], **({} if model is None else {"model": model})}
        answer = await embedding_router.http.post(path, json=body)
        if model is None and may_be_left_out:
            assert answer.status_code == 200
            continue
        error = check_error(answer, 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"


async def test_user_and_priority_reach_the_queue_from_every_api(embedding_router, monkeypatch):
    router, turnstile = embedding_router, embedding_router.server.frontend.pipeline._turnstile
    seen: list[tuple[str, int]] = []
    turn = turnstile.turn

    def noted(key: str, priority: int, *rest: Any) -> Any:
        seen.append((key, priority))
        return turn(key, priority, *rest)

    monkeypatch.setattr(turnstile, "turn", noted)
    said = {"user": "u", "priority": -5}
    for path in (*GENERATING, "/v1/embeddings"):
        answer = await router.http.post(path, json={"model": "fake", **ROUTES[path], **said})
        assert answer.status_code == 200, answer.text
    async with make_channel(f"127.0.0.1:{router.server.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        hi = pb.ChatMessage(role="user", content="hi")
        for call in (
            stub.Generate(pb.GenerateRequest(model="fake", prompt="x", **said)),
            stub.Chat(pb.ChatRequest(model="fake", messages=[hi], **said)),
        ):
            assert [message async for message in call]
    assert seen == [("user u", -5)] * 6


async def test_a_slash_too_many_is_an_unknown_url(embedding_router):
    """No redirect: its answer would not be OpenAI's, and clients drop the key or the body."""
    for path, body in ROUTES.items():
        answer = await embedding_router.http.post(f"{path}/", json={"model": "fake", **body})
        assert check_error(answer, 404)["code"] == "not_found"
    check_error(await embedding_router.http.get("/health/"), 404)


async def test_the_served_name_is_the_one_that_is_told():
    """V38."""
    async with running("served_model_name=mine") as router:
        for path in GENERATING:
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = {"model": "mine", **ROUTES[path], limit: 2}
            answer = await router.http.post(path, json=body)
            assert answer.json()["model"] == "mine"
        check_error(await router.http.get("/v1/models/fake"), 404)


INTERNAL = {
    "kv_transfer_params": {"remote_host": "10.0.0.1"}, "request_id": "x", "output_token_ids": [1],
    "source": {"address": "1.2.3.4:5"}, "hand_over": False, "block_ids": [1], "pooling": "mean",
    "prompt_embeds": "AAAA", "chat_template": "{{ 7 * 7 }}", "hashes": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
async def test_nothing_internal_is_taken_from_outside(embedding_router, path):
    """V76, V78, V79."""
    for name, value in INTERNAL.items():
        answer = await embedding_router.post(path, **ROUTES[path], **{name: value})
        assert check_error(answer, 400)["param"] == name
    assert all(not worker.requests for worker in embedding_router.cluster.everyone)


async def test_a_template_cannot_come_with_its_switches(router):
    """V78."""
    for path in GENERATING[1:]:
        for switches in ({"chat_template": "{{ 7 }}"}, {"enable_thinking": "{{ 7 }}"}):
            answer = await router.post(path, **ROUTES[path], chat_template_kwargs=switches)
            assert "chat_template_kwargs" in (check_error(answer, 400)["param"] or "")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "http://169.254.169.254/"},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}},
        {"type": "input_file", "file_url": "file:///etc/passwd"},
        {"type": "input_audio", "input_audio": {"data": "AA=="}},
    ],
)
async def test_nothing_is_fetched_for_a_client(router, part):
    """V77: only text is read, and the error names the part."""
    message = {"role": "user", "content": [{"type": "text", "text": "x"}, part]}
    chat = await router.post("/v1/chat/completions", messages=[message])
    assert check_error(chat, 400)["param"] == "messages[0].content[1].type"
    response = await router.post("/v1/responses", input=[message])
    assert check_error(response, 400)["param"] == "input[0].content[1].type"


TOO_MANY = [
    ("/v1/completions", {"prompt": ["x"] * 129}), ("/v1/completions", {"n": 10**6}),
    ("/v1/chat/completions", {"messages": HI * 4097}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}] * 129}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 10**5}),
    ("/v1/responses", {"input": HI * 4097}), ("/v1/responses", {"include": ["x"] * 10_000}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f"}] * 129}),
    ("/v1/responses", {"metadata": {str(i): "x" for i in range(17)}}),
    ("/v1/responses", {"metadata": {"x": "y" * 513}}), ("/v1/responses", {"top_logprobs": 10**5}),
    ("/v1/responses", {"stop": ["x"] * 500_000}), ("/v1/responses", {"user": "x" * 513}),
    ("/v1/embeddings", {"input": ["x"] * 2049}), ("/v1/embeddings", {"input": [[1]] * 100_000}),
]  # fmt: skip


async def test_too_many_of_anything_while_a_stream_runs(embedding_router):
    """V75, V35: refused at once; a stream beside it is not touched."""
    router = embedding_router
    decode = router.worker("decode-0")
    decode.gate = asyncio.Semaphore(0)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 4, "temperature": 0, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        first = json.loads((await anext(lines))[6:])
        for path, fields in TOO_MANY:
            check_error(await router.post(path, **{**ROUTES[path], **fields}), 400)
        for schema in ({"type": "objekt"}, {"const": "x" * 1_000_000}, {"properties": {"a": 3}}):
            wish = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            check_error(await router.post(prompt="x", response_format=wish), 400)
        assert len(router.worker("prefill-0").requests) == 1
        for _ in range(3):
            decode.gate.release()
        rest = "\n".join([line async for line in lines])
    texts = [first["choices"][0]["text"]]
    texts += [event["choices"][0]["text"] for event in events(rest)]
    assert "".join(texts) == answer_text("hello", 4)
    await router.idle()


async def cached(router: Running, path: str, **fields: Any) -> int:
    body = (await router.post(path, **fields)).json()
    usage = body["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.parametrize("path", GENERATING)
async def test_prefixes_are_shared_within_one_salt(router, path):
    """V66: none, a, b, and a salt that is another field's value."""
    text = "y" * (4 * BLOCK_SIZE)
    own = {
        "/v1/completions": {"prompt": text, "max_tokens": 2},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": text}], "max_tokens": 2,
        },
        "/v1/responses": {"input": text, "max_output_tokens": 2},
    }[path]  # fmt: skip
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "fake"}):
        assert await cached(router, path, **own, **salt) == 0
        assert await cached(router, path, **own, **salt, user="a") >= 4 * BLOCK_SIZE - BLOCK_SIZE
    for side in ("prefill-0", "decode-0"):
        salts = [request.cache_salt for request in router.worker(side).requests]
        assert salts == ["", "", "a", "a", "b", "b", "fake", "fake"]


async def test_a_choice_of_many_ends_alone_and_all_end_with_their_client(router_2p2d):
    """V20: eight prompts, some the same, four samples of each; then the client leaves."""
    prompts = ["a", "b", "a", "ccc" * 30, "d", "a", "e", "b"]
    fields = {"prompt": prompts, "n": 4, "max_tokens": 3, "seed": 9, "temperature": 1}
    body = (await router_2p2d.post(**fields)).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [answer_text(prompts[i // 4], 3, 9 + i) for i in range(32)]
    await router_2p2d.idle()
    for worker in router_2p2d.cluster.everyone:
        if worker.role == "decode":
            worker.gate = asyncio.Semaphore(0)
    leaving = {"model": "fake", **fields, "stream": True}
    async with router_2p2d.http.stream("POST", "/v1/completions", json=leaving) as stream:
        await anext(stream.aiter_lines())
    await router_2p2d.idle()
    ids = [r.request_id for w in router_2p2d.cluster.everyone if w.role == "prefill"
           for r in w.requests]  # fmt: skip
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING[:2])
async def test_every_token_of_every_choice_has_its_logprob(router, path, stream):
    """V18: the first included, which another worker samples."""
    asked = {"logprobs": 5} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 5}
    answer = await router.post(path, **ROUTES[path], **asked, n=3, max_tokens=4, stream=stream)
    chunks = events(answer.text) if stream else [answer.json()]
    scores: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        logprobs = choice["logprobs"] or {"token_logprobs": [], "content": []}
        found = logprobs.get("token_logprobs")
        if found is None:
            assert all(len(entry["top_logprobs"]) == 5 for entry in logprobs["content"])
            found = [entry["logprob"] for entry in logprobs["content"]]
        scores[choice["index"]] += found
    assert scores == {index: [-0.5, -1.5, -2.5, -3.5] for index in range(3)}


@pytest.mark.parametrize("path", GENERATING)
async def test_the_end_at_the_first_token(router, path):
    """V17: a limit of one, and EOS first; no decode step, the right reason, the right count."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for stream in (False, True):
        answer = await router.post(path, **ROUTES[path], **{limit: 1}, stream=stream)
        assert answer.status_code == 200
        assert not router.worker("decode-0").requests
        if stream and path != "/v1/responses":
            assert is_done(answer.text)
    for worker in router.cluster.everyone:
        worker.script = lambda prompt, index: EOS
    body = (await router.post(path, **ROUTES[path], **{limit: 8})).json()
    if path == "/v1/responses":
        assert body["status"] == "completed" and body["usage"]["output_tokens"] == 1
        assert body["output"][0]["content"][0]["text"] == ""
    else:
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 1
    await router.idle()


async def test_a_seed_gives_the_same_answer_on_every_pair(router_2p2d):
    """V29: whatever runs beside it."""
    fields = {"prompt": "hello", "max_tokens": 6, "seed": 42, "temperature": 1}
    noise = [router_2p2d.post(prompt=f"n{i}", max_tokens=1 + i % 5) for i in range(12)]
    answers = await asyncio.gather(*(router_2p2d.post(**fields) for _ in range(6)), *noise)
    assert {a.json()["choices"][0]["text"] for a in answers[:6]} == {answer_text("hello", 6, 42)}
    pairs = {
        worker.id for worker in router_2p2d.cluster.everyone
        if any(request.sampling.seed == 42 for request in worker.requests)
    }  # fmt: skip
    assert len(pairs) > 2
