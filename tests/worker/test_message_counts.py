"""What a request costs in messages and bytes: none is sent that nobody needs."""

from collections import Counter
from pathlib import Path
from typing import Any

from support.pair import BLOCK, prompt, request, running_pair, tiny_config

NUM_TOKENS = 12


async def _read(call: Any) -> tuple[Counter[str], list[int], Any]:
    """Messages by kind, tokens of each message that has some, and `started`."""
    kinds: Counter[str] = Counter()
    tokens, started = [], None
    async for event in call:
        kind = event.WhichOneof("event")
        kinds[kind] += 1
        if kind == "tokens":
            tokens.append(len(event.tokens.tokens))
        elif kind == "started":
            started = event.started
    return kinds, tokens, started


async def test_at_most_one_message_a_step_and_only_the_blocks_that_are_missing(
    tiny_model_dir: Path,
) -> None:
    async with running_pair(tiny_config(tiny_model_dir)) as pair:
        for shared_blocks in (0, 3):
            # The second prompt shares its first blocks with the first one.
            tokens = prompt(3 * BLOCK, seed=1) + prompt(2 * BLOCK + 1, seed=2 + shared_blocks)
            asked = request(tokens, NUM_TOKENS)
            prefill = pair.prefill_call(asked)
            decode = pair.decode_call(asked, pair.source())
            kinds, tokens_of, started = await _read(decode)
            # Tokens that wait for the stream go together.
            assert kinds.keys() == {"started", "tokens"} and kinds["started"] == 1
            assert kinds["tokens"] <= NUM_TOKENS - 1 == sum(tokens_of)
            missing = 6 - shared_blocks
            block_bytes = pair.decode.info.kv_block_bytes
            assert started.num_cached_tokens == shared_blocks * BLOCK
            assert started.kv_bytes == missing * block_bytes
            kinds, _, _ = await _read(prefill)
            assert kinds == {"started": 1, "first_token": 1}
        await pair.wait_idle()
