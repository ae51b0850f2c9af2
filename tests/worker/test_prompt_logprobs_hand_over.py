"""Logprobs of the prompt come from whoever computes it, in bounded messages, and cost no block."""

from core.types import TokenLogprobs
from rpc import codec
from support.pair import request, running_pair, tiny_config


async def test_both_kinds_of_workers_score_a_prompt_alike(tiny_model_dir):
    prompt = [(7 * i) % 250 for i in range(90)]
    async with running_pair(tiny_config(tiny_model_dir, num_kv_blocks=32)) as pair:

        async def scores(call) -> tuple[list[TokenLogprobs], int, list[int]]:
            found, num_messages, tokens = [], 0, []
            async for event in call:
                kind = event.WhichOneof("event")
                if kind == "prompt_logprobs":
                    assert not tokens and event.prompt_logprobs.first_index == 1 + len(found)
                    num_messages += 1
                    for token in event.prompt_logprobs.tokens:
                        token_id, logprobs = codec.token_from_pb(token)
                        assert token_id == prompt[1 + len(found)]
                        found.append(logprobs)
                elif kind == "first_token" and event.first_token.HasField("token"):
                    tokens.append(event.first_token.token.id)
                elif kind == "tokens":
                    tokens += [token.id for token in event.tokens.tokens]
            return found, num_messages, tokens

        scored = request(prompt, max_tokens=0, prompt_logprobs=2)
        on_prefill = await scores(pair.prefill_call(scored, hand_over=False))
        assert len(on_prefill[0]) == 89 and on_prefill[1] == 3 and on_prefill[2] == []
        assert await scores(pair.decode_call(scored, None)) == on_prefill
        one = request(prompt, max_tokens=1, prompt_logprobs=2)
        with_token = await scores(pair.prefill_call(one, hand_over=False))
        assert with_token[:2] == on_prefill[:2] and len(with_token[2]) == 1
        await pair.wait_idle()
