"""An answer that is cut anywhere and goes on elsewhere is the answer that was never cut; prefilled
by P or by D itself, it is the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.types import GenerationRequest
from support.pair import Pair, prompt, request, running_pair, tiny_config

SAMPLED = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11, "min_tokens": 9,
    "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
    "logit_bias": {7: 1.5},
}  # fmt: skip
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.1}


async def tokens(pair: Pair, asked: GenerationRequest, is_local: bool) -> list[int]:
    answer = await (pair.alone if is_local else pair.generate)(asked)
    assert answer.error is None
    return answer.tokens


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["seeded", "greedy"])
async def test_an_answer_cut_after_any_token_goes_on_as_if_nothing_had_happened(
    tiny_model_dir: Path, sampling
):
    async with running_pair(tiny_config(tiny_model_dir)) as pair:
        whole = request(prompt(30), max_tokens=16, **sampling)
        # A token that the undisturbed answer has after min_tokens ends it.
        free = await tokens(pair, whole, is_local=False)
        stop = replace(whole.sampling, stop_token_ids=(free[12],))
        whole = replace(whole, request_id="whole", sampling=stop)
        expected = await tokens(pair, whole, is_local=False)
        assert 9 <= len(expected) <= 13 and expected == free[: len(expected)]
        for done in range(1, len(expected)):
            for is_local in (False, True):
                rest = replace(
                    whole,
                    request_id=f"{done} {is_local}",
                    output_token_ids=tuple(expected[:done]),
                )
                assert await tokens(pair, rest, is_local) == expected[done:], (done, is_local)
        again = replace(whole, request_id="again")
        assert await tokens(pair, again, is_local=True) == expected
        await pair.wait_idle()
