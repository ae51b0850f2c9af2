"""The hand-over between two real workers, undisturbed: the answers of one worker, nothing twice.

Each test ends with `wait_idle`: no block in use, no lease, both engines sound.
"""

import asyncio
from pathlib import Path

import pytest

from core.errors import EngineError, RequestError
from core.types import FinishReason
from support.pair import (
    BLOCK,
    Pair,
    prompt,
    request,
    running_pair,
    tiny_config,
)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100])
async def test_equals_one_worker_cold_and_warm(any_pair: Pair, length: int) -> None:
    """V03: also where nothing is left to pull because D has the prefix from the first time."""
    # Salts keep D's own prefix cache from hiding the transfer, and the oracle from warming it.
    cold = await any_pair.generate(request(prompt(length), cache_salt="a"))
    warm = await any_pair.generate(request(prompt(length), cache_salt="a"))
    alone = await any_pair.alone(request(prompt(length), cache_salt="b"))
    assert cold.error is None and warm.error is None and alone.error is None
    assert cold.tokens == warm.tokens == alone.tokens
    assert len(cold.tokens) == 12
    assert cold.finish_reason is FinishReason.LENGTH
    num_blocks = -(-length // BLOCK)
    assert cold.decode_started is not None and warm.decode_started is not None
    assert cold.decode_started.num_transferred_tokens == length
    assert cold.decode_started.num_cached_tokens == 0
    block_bytes = any_pair.decode.info.kv_block_bytes
    assert cold.decode_started.kv_bytes == num_blocks * block_bytes
    held = length // BLOCK
    assert warm.decode_started.num_cached_tokens == held * BLOCK
    assert warm.decode_started.kv_bytes == (num_blocks - held) * block_bytes
    # V21: a hit is what P found in its own cache; at least one token is always computed there.
    assert cold.prefill_started is not None and warm.prefill_started is not None
    assert cold.prefill_started.num_cached_tokens == 0
    assert warm.prefill_started.num_cached_tokens == (length - 1) // BLOCK * BLOCK


async def test_salts_share_nothing_across_the_hand_over(pair: Pair) -> None:
    """V66: on neither side, also where a salt looks like another field; within a salt they do."""
    tokens, answers = prompt(4 * BLOCK), []
    for salt in ("a", "b", "", str(BLOCK), "a\0", f"a{tokens[0]}"):
        for _ in range(2):
            answer = await pair.generate(request(tokens, cache_salt=salt))
            assert answer.prefill_started is not None and answer.decode_started is not None
            p, d = answer.prefill_started.num_cached_tokens, answer.decode_started.num_cached_tokens
            answers.append((answer.tokens, p, d))
    cold, warm = answers[::2], answers[1::2]
    assert {(p, d) for _, p, d in cold} == {(0, 0)}
    assert {(p, d) for _, p, d in warm} == {(3 * BLOCK, 4 * BLOCK)}
    assert all(tokens == answers[0][0] for tokens, _, _ in answers)


async def test_decode_computes_no_prompt(any_pair: Pair) -> None:
    await any_pair.generate(request(prompt(100)))
    stats = await any_pair.decode.runtime.run_on_engine(lambda e: e.stats())
    assert stats.tokens_prefilled_total == 0
    assert any_pair.decode.runtime.transport_in_use.startswith(
        any_pair.decode.runtime.settings.config.kv_transfer.transport
    )


async def test_many_at_once_with_equal_prompts(any_pair: Pair) -> None:
    """V20: n > 1 and prompt lists: one attempt, one lease, one transfer for each sequence."""
    expected = await any_pair.alone(request(prompt(40), cache_salt="oracle"))
    answers = await asyncio.gather(*[any_pair.generate(request(prompt(40))) for _ in range(8)])
    assert [a.tokens for a in answers] == [expected.tokens] * 8


async def test_sampled_tokens_do_not_depend_on_the_hand_over(any_pair: Pair) -> None:
    options = {"temperature": 0.9, "seed": 42, "max_tokens": 16}
    handed = await any_pair.generate(request(prompt(50), **options))
    alone = await any_pair.alone(request(prompt(50), cache_salt="x", **options))
    assert handed.tokens == alone.tokens


async def test_resumed_output_continues(pair: Pair) -> None:
    """An attempt may begin behind tokens that an earlier one emitted."""
    from dataclasses import replace

    whole = await pair.alone(request(prompt(30), max_tokens=20, cache_salt="x"))
    rest = replace(request(prompt(30), max_tokens=20), output_token_ids=tuple(whole.tokens[:7]))
    answer = await pair.generate(rest)
    assert answer.tokens == whole.tokens[7:]


# ------------------------------------------------------------------ the first token is the last


@pytest.mark.parametrize("how", ["length", "stop"])
async def test_finished_at_the_first_token_never_decodes(pair: Pair, how: str) -> None:
    """V17"""
    first = (await pair.alone(request(prompt(20), max_tokens=1, cache_salt="x"))).tokens[0]
    before = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
    if how == "length":
        answer = await pair.generate(request(prompt(20), max_tokens=1))
        assert answer.finish_reason is FinishReason.LENGTH
    else:
        answer = await pair.generate(request(prompt(20), stop_token_ids=(first,)))
        assert answer.finish_reason is FinishReason.STOP
    assert answer.error is None
    assert answer.tokens == [first]
    after = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
    assert after.tokens_decoded_total == before.tokens_decoded_total


async def test_max_tokens_two_is_one_of_each(pair: Pair) -> None:
    answer = await pair.generate(request(prompt(20), max_tokens=2))
    assert len(answer.tokens) == 2
    assert answer.finish_reason is FinishReason.LENGTH


async def test_prompt_too_long_for_one_side_never_decodes(tiny_model_dir: Path) -> None:
    """V22"""
    config = tiny_config(tiny_model_dir, max_model_len=64)
    big = tiny_config(tiny_model_dir, max_model_len=128)
    async with running_pair(config, big) as pair:
        for length, is_accepted in ((62, True), (63, True), (64, False), (65, False)):
            answer = await pair.generate(request(prompt(length), max_tokens=1))
            if is_accepted:
                assert answer.error is None and len(answer.tokens) == 1
            else:
                assert isinstance(answer.error, RequestError)
                assert answer.tokens == []
        await pair.wait_idle()


async def test_what_the_engine_refuses_ends_the_request_as_its_output(pair: Pair) -> None:
    runtime = pair.decode.runtime

    def refuse(error: Exception) -> None:
        raise error

    for error, kind in ((RequestError("too long"), RequestError), (ValueError("odd"), EngineError)):
        with runtime.outputs.open("refused") as outputs:
            runtime.add_on_engine("refused", lambda e, error=error: refuse(error))
            with pytest.raises(kind, match=str(error)):
                await asyncio.wait_for(outputs.next(), 10)
