"""`echo` and `prompt_logprobs` of /v1/completions."""

import json

import pytest

from support.fake_answers import answer_text
from support.router import Running, running

PROMPT = "caf\u00e9 au"
IDS = list(PROMPT.encode())
OFFSETS = [0, 1, 2, 3, 3, 4, 5, 6]  # the é is two tokens and one character


@pytest.fixture(params=["prefill", "colocated"])
async def router(request):
    """With the prompt computed on a prefill worker, and on the decode worker itself."""
    kinds = {"prefills": 1, "decodes": 1} if request.param == "prefill" else {}
    if not kinds:
        kinds = {"prefills": 0, "decodes": 0, "colocated": 1}
    async with running(**kinds) as it:
        yield it


async def streamed(router: Running, **fields: object) -> dict:
    """The choices of a stream put together again."""
    whole: dict = {"text": "", "tokens": [], "text_offset": [], "token_logprobs": []}
    response = await router.post(stream=True, temperature=0, **fields)
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for key in ("tokens", "text_offset", "token_logprobs"):
                whole[key] += (choice["logprobs"] or {}).get(key, [])
    return whole


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_echo_scores_the_prompt_and_what_follows(router, prompt, max_tokens):
    """V33: ids and text, streamed and not; the first entry is null, offsets index the text."""
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    body = await router.complete(**fields)
    choice = body["choices"][0]
    answer = answer_text(PROMPT, max_tokens)
    assert choice["text"] == PROMPT + answer
    assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), max_tokens)
    scores = choice["logprobs"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1 : len(IDS)] == [-i / 8 for i in range(1, len(IDS))]
    assert len(scores["token_logprobs"]) == len(IDS) + max_tokens
    assert scores["text_offset"] == OFFSETS + [len(PROMPT) + i for i in range(max_tokens)]
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset] == token
    assert all(len(top) == 2 for top in scores["top_logprobs"][1:])
    pieces = await streamed(router, **fields)
    assert pieces == {
        "text": choice["text"], "finish_reason": "length",
        **{key: scores[key] for key in ("tokens", "text_offset", "token_logprobs")},
    }  # fmt: skip


async def test_echo_alone_asks_for_no_scores(router):
    body = await router.complete(PROMPT, echo=True, max_tokens=3, n=2)
    assert [c["text"] for c in body["choices"]] == [PROMPT + answer_text(PROMPT, 3)] * 2
    assert body["choices"][0]["logprobs"] is None
    sampling = router.cluster.everyone[0].requests[0].sampling
    assert not sampling.HasField("prompt_logprobs")


async def test_prompt_logprobs_are_listed_by_token_id(router):
    body = await router.complete(PROMPT, prompt_logprobs=2, max_tokens=1)
    listed = body["choices"][0]["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(IDS)
    assert listed[1] == {
        str(IDS[1]): {"logprob": -1 / 8, "rank": 1},
        str(IDS[1] + 1): {"logprob": -2 / 8, "rank": 2},
    }
    assert body["choices"][0]["text"] == answer_text(PROMPT, 1)
    assert body["choices"][0]["logprobs"] is None


async def test_only_the_worker_that_computes_the_prompt_is_asked_to_score_it():
    async with running() as router:
        await router.complete(PROMPT, echo=True, logprobs=0, max_tokens=4)
        prefill, decode = router.worker("prefill-0"), router.worker("decode-0")
        assert prefill.requests[0].sampling.HasField("prompt_logprobs")
        assert not decode.requests[0].sampling.HasField("prompt_logprobs")


async def test_no_tokens_without_a_score_is_refused():
    async with running() as router:
        response = await router.post(prompt=PROMPT, max_tokens=0)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"
        chat = [{"role": "user", "content": "x"}]
        for fields in ({"max_tokens": 0}, {"echo": True}, {"prompt_logprobs": 1}):
            response = await router.post("/v1/chat/completions", messages=chat, **fields)
            assert response.status_code == 400
        fields = {"echo": False, "prompt_logprobs": None}
        response = await router.post("/v1/chat/completions", messages=chat, **fields)
        assert response.status_code == 200
