"""/v1/completions and /v1/chat/completions: what is answered, whole and in a stream."""

import json

import pytest

from support.byte_tokenizer import EOS
from support.fake_answers import answer_text
from support.sse import events, stream_body


async def test_answers_in_order_from_both_legs(router):
    body = await router.complete("hello", max_tokens=5)
    choice = body["choices"][0]
    assert choice["text"] == answer_text("hello", 5)
    assert choice["finish_reason"] == "length"
    assert body["model"] == "fake" and body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 5
    prefill, decode = router.worker("prefill-0"), router.worker("decode-0")
    assert prefill.requests[0].request_id == decode.requests[0].request_id
    assert prefill.hand_overs == [True]


async def test_stream_is_the_same_text_and_right_to_the_byte(router):
    response = await router.post(prompt="hello", max_tokens=4, temperature=0, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    raw = response.content
    assert raw.endswith(b"\n\ndata: [DONE]\n\n") and raw.count(b"[DONE]") == 1
    assert all(piece.startswith(b"data: ") for piece in raw.split(b"\n\n")[:-1])
    chunks = events(response.text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer_text("hello", 4)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


async def test_each_token_is_sent_when_it_is_there(router):
    """V51: no event waits for a later one."""
    import asyncio

    prefill, decode = router.worker("prefill-0"), router.worker("decode-0")
    prefill.gate, decode.gate = asyncio.Semaphore(0), asyncio.Semaphore(0)
    body = {"model": "fake", "prompt": "hi", "max_tokens": 3, "temperature": 0, "stream": True}
    request = router.http.stream("POST", "/v1/completions", json=body)
    prefill.gate.release()
    async with request as response:
        lines = response.aiter_lines()
        expected = answer_text("hi", 3)
        for position in range(3):
            line = await anext(lines)
            assert json.loads(line[6:])["choices"][0]["text"] == expected[position]
            assert await anext(lines) == ""
            decode.gate.release()
        assert await anext(lines) == "data: [DONE]"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_in_a_stream_only_if_asked_for(router, options):
    """V37."""
    response = await router.post(prompt="hello", max_tokens=1, stream=True, stream_options=options)
    chunks = events(response.text)
    if options and options.get("include_usage"):
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 1
        assert all(c["usage"] is None for c in chunks[:-1])
    else:
        assert all("usage" not in c for c in chunks)


async def test_one_token_never_starts_a_decode_leg(router):
    """V17."""
    body = await router.complete("hello", max_tokens=1)
    assert body["choices"][0]["text"] == answer_text("hello", 1)
    assert body["choices"][0]["finish_reason"] == "length"
    assert router.worker("prefill-0").hand_overs == [False]
    assert router.worker("decode-0").requests == []
    body = await router.complete("hello", max_tokens=2)
    assert body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_end_at_the_first_token(router, stream):
    """V17: EOS, a stop token and a stop string on the token that P samples."""
    first = answer_text("hello", 1)
    cases = (
        ({"logit_bias": {str(EOS): 100}}, ""),
        ({"stop_token_ids": [ord(first)]}, ""),
        ({"stop": first}, ""),
    )
    for fields, text in cases:
        fields = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "stream": stream, **fields}
        response = await router.post(**fields)
        got, reason = (
            stream_body(response.text)
            if stream
            else (
                response.json()["choices"][0]["text"],
                response.json()["choices"][0]["finish_reason"],
            )
        )
        assert (got, reason) == (text, "stop"), fields
        await router.idle()
    # The decode leg was open and is cancelled before it sent anything.
    assert all(worker.active == 0 for worker in router.cluster.everyone)


async def test_ignore_eos_goes_on(router):
    fields = {"logit_bias": {str(EOS): 100}, "max_tokens": 3, "return_token_ids": True}
    body = await router.complete("hello", ignore_eos=True, **fields)
    assert body["choices"][0]["token_ids"] == [EOS] * 3
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "length"


async def test_stop_string_across_tokens_and_legs(router):
    text = answer_text("hello", 10)
    body = await router.complete("hello", max_tokens=10, stop=["??", text[2:5]])
    assert body["choices"][0]["text"] == text[:2]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 5
    straddling = await router.complete("hello", max_tokens=10, stop=text[0:2])
    assert straddling["choices"][0]["text"] == ""
    await router.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_times_n(router_2p2d, stream):
    """V20, V39: every choice is a sequence of its own; index = prompt * n + sample."""
    prompts = ["a", "bb" * 40, "a"]
    response = await router_2p2d.post(
        prompt=prompts, n=2, max_tokens=4, seed=3, stream=stream, temperature=1
    )
    if stream:
        texts = [""] * 6
        reasons = [None] * 6
        for chunk in events(response.text):
            choice = chunk["choices"][0]
            assert reasons[choice["index"]] is None, "a chunk after the last"
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert reasons == ["length"] * 6
    else:
        body = response.json()
        assert [c["index"] for c in body["choices"]] == list(range(6))
        texts = [c["text"] for c in body["choices"]]
        assert body["usage"]["prompt_tokens"] == 1 + 80 + 1
        assert body["usage"]["completion_tokens"] == 24
    assert texts == [answer_text(prompts[i // 2], 4, 3 + i) for i in range(6)]
    ids = [request.request_id for p in (0, 1) for request in
           router_2p2d.worker(f"prefill-{p}").requests]  # fmt: skip
    assert len(set(ids)) == 6


async def test_token_id_prompts_and_ids_back(router):
    ids = list(b"hello")
    body = await router.complete(ids, max_tokens=3, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == list(answer_text("hello", 3).encode())
    both = await router.complete([ids, list(b"you")], max_tokens=2)
    assert [c["text"] for c in both["choices"]] == [answer_text("hello", 2), answer_text("you", 2)]
    response = await router.post(
        prompt=ids, max_tokens=3, temperature=0, stream=True, return_token_ids=True
    )
    chunks = [c["choices"][0] for c in events(response.text)]
    assert chunks[0]["prompt_token_ids"] == ids
    assert sum((c["token_ids"] for c in chunks), []) == choice["token_ids"]


async def test_completion_logprobs_cover_every_token(router):
    """V18: the first included, with offsets into the text."""
    body = await router.complete("hello", max_tokens=4, logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(answer_text("hello", 4))
    assert logprobs["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4


async def test_logprobs_of_tokens_that_are_no_characters(router):
    """V43."""
    script = "a语b".encode()
    for worker in router.cluster.everyone:
        worker.script = lambda prompt, index: script[index]
    body = await router.complete("x", max_tokens=5, logprobs=0)
    choice = body["choices"][0]
    assert choice["text"] == "a语b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    assert choice["logprobs"]["tokens"][1] == "bytes:\\xe8"
    response = await router.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=5,
        logprobs=True,
        stream=True,
    )
    chunks = events(response.text)
    entries = [e for c in chunks if (lp := c["choices"][0]["logprobs"]) for e in lp["content"]]
    assert bytes(b for entry in entries for b in entry["bytes"]) == script
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(deltas) == "a语b" and "\ufffd" not in "".join(deltas)


async def test_chat(router):
    messages = [{"role": "user", "content": "hello"}]
    prompt = "user: hello\nassistant:"
    fields = {"messages": messages, "temperature": 0, "max_completion_tokens": 4}
    body = (await router.post("/v1/chat/completions", **fields)).json()
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": answer_text(prompt, 4), "refusal": None}
    response = await router.post("/v1/chat/completions", **fields, stream=True)
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == message["content"]


async def test_chat_defaults_to_the_rest_of_the_context(router):
    for worker in router.cluster.everyone:
        worker.script = lambda prompt, index: EOS if index == 3 else ord("x")
    body = await router.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert body.json()["choices"][0]["message"]["content"] == "xxx"
    prompt_tokens = body.json()["usage"]["prompt_tokens"]
    sent = router.worker("prefill-0").requests[0].sampling
    assert sent.max_tokens == 4096 - prompt_tokens
    assert list(sent.stop_token_ids) == [EOS]


async def test_chat_content_forms_are_equal(router):
    """V31."""
    forms = ["hi", [{"type": "text", "text": "hi"}]]
    bodies = [
        await router.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": form}],
            max_tokens=1,
            return_token_ids=True,
        )
        for form in forms
    ]
    ids = [body.json()["choices"][0]["prompt_token_ids"] for body in bodies]
    assert ids[0] == ids[1]


async def test_cached_tokens_are_what_prefill_found(router):
    """V21: cold 0, warm the hit on P; what D pulled is no hit."""
    prompt = list(range(40))
    for stream in (False, True):
        prompt = [token + 1 for token in prompt]
        for expected in (0, 32):
            fields = {"prompt": prompt, "max_tokens": 3, "temperature": 0}
            if stream:
                response = await router.post(
                    **fields, stream=True, stream_options={"include_usage": True}
                )
                usage = events(response.text)[-1]["usage"]
            else:
                usage = (await router.post(**fields)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected
            assert usage["prompt_tokens"] == 40


async def test_cached_tokens_of_several_samples_start_cold(router):
    body = (await router.post(prompt=list(range(40)), n=3, max_tokens=2)).json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_client_ids_are_echoed_and_never_used(router):
    """V25."""
    import asyncio

    headers = {"x-request-id": "mine"}
    body = {"model": "fake", "prompt": "hello", "max_tokens": 3, "temperature": 0}
    answers = await asyncio.gather(
        *(router.http.post("/v1/completions", json=body, headers=headers) for _ in range(2))
    )
    assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
    assert all(a.json()["choices"][0]["text"] == answer_text("hello", 3) for a in answers)
    requests = router.worker("prefill-0").requests
    assert len({r.request_id for r in requests}) == 2
    assert all(r.client_request_id == "mine" != r.request_id for r in requests)
    bad = await router.http.get("/health", headers={"x-request-id": "a b"})
    assert len(bad.headers["x-request-id"]) == 32


async def test_seed_is_set_and_differs_by_choice(router):
    await router.post(prompt="x", n=2, max_tokens=1)
    await router.post(prompt="x", seed=-1, max_tokens=1)
    first, second, third = (r.sampling.seed for r in router.worker("prefill-0").requests)
    assert abs(first - second) == 1 and third == 2**64 - 1


async def test_models_cluster_health_ready_metrics(router):
    models = (await router.http.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == ["fake"]
    assert (await router.http.get("/v1/models/fake")).json()["max_model_len"] == 4096
    assert (await router.http.get("/v1/models/other")).status_code == 404
    assert (await router.http.get("/health")).status_code == 200
    assert (await router.http.get("/ready")).status_code == 200
    view = (await router.http.get("/cluster")).json()
    assert view["mode"] == "disaggregated" and view["model"] == "fake"
    prefill, decode = view["workers"]
    assert prefill["id"] == "prefill-0" and prefill["role"] == "prefill"
    assert prefill["state"] == "ready" and prefill["kv_blocks"]["total"] == 256
    assert "kv_bytes_sent_total" in prefill and "kv_bytes_received_total" in decode
    await router.complete("hello", max_tokens=3)
    text = (await router.http.get("/metrics")).text
    assert 'pdserve_kv_blocks{role="prefill",state="free",worker="prefill-0"} 256.0' in text
    assert "pdserve_router_requests_in_flight 0.0" in text
    assert "pdserve_time_to_first_token_seconds_count 1.0" in text
    assert "pdserve_generation_tokens_total 3.0" in text
