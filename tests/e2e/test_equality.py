"""Greedy output through the whole system equals the reference, token for token, in float32."""

from collections.abc import Callable

import pytest

from support.live import Live
from support.reference import greedy

KINDS = ("nixl", "grpc", "2p2d", "colocated")
NUM_TOKENS = 24
BLOCK = 16  # configs/*.yaml leave the default

LONG = [1000 + 7 * i % 30000 for i in range(300)]  # five chunks of 64
PROMPTS: dict[str, object] = {
    "one token": [504],
    "one block": LONG[:BLOCK],
    "one block and one": LONG[: BLOCK + 1],
    "several chunks": LONG,
    "first time": "The capital of France is",
    "second time": "The capital of France is",
    "chinese": "北京是中国的首都，人口超过两千万。",
}
CHAT = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers(live: Callable[[str], Live], kind: str) -> None:
    cluster = live(kind)
    for name, prompt in PROMPTS.items():
        body = cluster.complete(
            prompt, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True
        )
        choice = body["choices"][0]
        expected = greedy(choice["prompt_token_ids"], NUM_TOKENS)
        assert choice["token_ids"] == expected, name
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == NUM_TOKENS
    cluster.wait_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_chat_equals_transformers(live: Callable[[str], Live], kind: str) -> None:
    cluster = live(kind)
    response = cluster.post(
        "/v1/chat/completions",
        {
            "model": "smollm2-135m",
            "messages": CHAT,
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert response.status_code == 200, response.text
    body = response.json()
    prompt_ids = body["prompt_token_ids"] if "prompt_token_ids" in body else (
        body["choices"][0]["prompt_token_ids"]
    )  # fmt: skip
    assert body["choices"][0]["token_ids"] == greedy(prompt_ids, NUM_TOKENS)
    cluster.wait_idle()


@pytest.mark.parametrize("kind", ("nixl", "grpc"))
def test_decode_computes_no_prompt_and_receives_exactly_its_blocks(
    live: Callable[[str], Live], kind: str
) -> None:
    """V16: a deployment that looks healthy while decode silently recomputes prompts is broken."""
    cluster = live(kind)
    before = {w["role"]: w for w in cluster.workers()}
    prompt = [2000 + 11 * i % 30000 for i in range(300)]
    cluster.complete(prompt, max_tokens=4, ignore_eos=True)
    cluster.wait_idle()
    after = {w["role"]: w for w in cluster.workers()}

    def grown(role: str, counter: str) -> int:
        return int(after[role][counter] - before[role][counter])

    num_blocks = -(-300 // BLOCK)
    block_bytes = (
        30 * 2 * 3 * BLOCK * 64 * 4
    )  # layers, k and v, kv heads, tokens, head_dim, float32
    assert grown("prefill", "tokens_prefilled_total") == 300
    assert grown("decode", "tokens_prefilled_total") == 0
    assert grown("decode", "kv_bytes_received_total") == num_blocks * block_bytes
    assert grown("prefill", "kv_bytes_sent_total") == num_blocks * block_bytes
    assert after["decode"]["transport"].startswith(kind)
