"""V55: a prefill that is silent for longer than two rounds of keepalive pings."""

import time
from pathlib import Path
from typing import Any

import pytest

from support.pair import prompt, request, running_pair, tiny_config

pytestmark = pytest.mark.slow
SILENCE_S = 25.0  # pings come every 10 s


async def test_pings_during_a_long_silence_break_nothing(tiny_model_dir: Path) -> None:
    async with running_pair(tiny_config(tiny_model_dir)) as pair:
        engine = pair.prefill.runtime.engine
        forward = engine.model.forward

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(SILENCE_S)
            return forward(*args, **kwargs)

        engine.model.forward = slowly
        answer = await pair.generate(request(prompt(20)), timeout_s=4 * SILENCE_S)
        engine.model.forward = forward
        alone = await pair.alone(request(prompt(20), cache_salt="x"))
        assert answer.error is None and answer.tokens == alone.tokens
        await pair.wait_idle()
