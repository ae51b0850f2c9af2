"""A worker that is to go: nothing new, and what is there comes to its end."""

import asyncio
from pathlib import Path

from support.pair import prompt, request, running_pair, tiny_config


async def test_a_drain_waits_for_streams_and_hand_overs_and_says_whether_they_ended(
    tiny_model_dir: Path,
) -> None:
    """V63: the prefill worker that drains in the middle of a hand-over lets it finish."""
    async with running_pair(tiny_config(tiny_model_dir)) as pair:
        running = asyncio.create_task(pair.generate(request(prompt(40), max_tokens=200)))
        async with asyncio.timeout(20):
            while not (pair.prefill.num_requests and pair.decode.num_requests):
                await asyncio.sleep(0)
        assert await pair.decode.drain(0.0) is False
        drained = await asyncio.gather(pair.prefill.drain(30.0), pair.decode.drain(30.0))
        assert drained == [True, True]
        answer = await running
        assert answer.error is None
        assert len(answer.tokens) == 200
        refused = await pair.generate(request(prompt(20)))
        assert refused.error is not None and "draining" in refused.error.message
        await pair.wait_idle()
