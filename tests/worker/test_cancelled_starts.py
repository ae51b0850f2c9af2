"""A cancel may come at any moment of a start."""

import asyncio
import random
from pathlib import Path

from support.pair import prompt, request, running_pair, tiny_config

NUM_REQUESTS, AT_ONCE = 500, 50
MAX_NUM_SEQS = 8


async def test_requests_cancelled_as_they_start_leave_the_whole_capacity(
    tiny_model_dir: Path,
) -> None:
    """V60: 500 requests, each cancelled 0 to 50 ms after it was sent, both legs or only one. No
    worker dies of it, nothing stays held, and as many as fit run at once afterwards."""
    config = tiny_config(tiny_model_dir, max_num_seqs=MAX_NUM_SEQS, num_kv_blocks=128)
    async with running_pair(config) as pair:
        dice = random.Random(60)

        async def cancelled(number: int) -> None:
            tokens = prompt(dice.choice([9, 24, 70]), seed=number % 20)
            one = request(tokens, max_tokens=400)
            calls = [pair.prefill_call(one), pair.decode_call(one, pair.source())]
            order = dice.choice([calls, calls[::-1], calls[:1], calls[1:]])
            await asyncio.sleep(dice.random() * 0.05)
            for call in order:
                call.cancel()
            await asyncio.sleep(0)
            for call in calls:  # as a router does when one leg has failed
                call.cancel()

        for first in range(0, NUM_REQUESTS, AT_ONCE):
            await asyncio.gather(*(cancelled(first + n) for n in range(AT_ONCE)))
        assert not pair.prefill.failed.done() and not pair.decode.failed.done()
        await pair.wait_idle(timeout_s=20)

        wanted = await pair.alone(request(prompt(40), max_tokens=30))
        answers = await asyncio.gather(
            *(pair.generate(request(prompt(40), max_tokens=30)) for _ in range(MAX_NUM_SEQS))
        )
        assert [a.error for a in answers] == [None] * MAX_NUM_SEQS
        assert all(a.tokens == wanted.tokens for a in answers)
        await pair.wait_idle()
