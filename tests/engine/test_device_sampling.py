"""What a GPU does otherwise in the sampler, run on a CPU: the answers must be the same."""

import random

import pytest
import torch

from core.types import SamplingParams
from engine import draw
from engine.draw import make_draws
from engine.logprobs import _batched, logprobs_of
from engine.staging import Staging


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_logprobs_of_all_rows_at_once_are_those_of_one_by_one(spread):
    logits = (torch.randn(6, 301) * spread).round(decimals=1)  # with ties
    tokens, tops = [0, 300, 5, 17, 40, 41], [0, 3, 1, 301, 500, 0]
    one_by_one = logprobs_of(logits, tokens, tops)
    at_once = _batched(logits, tokens, tops)
    assert [entry.logprob for entry in at_once] == [entry.logprob for entry in one_by_one]
    assert [entry.top for entry in at_once] == [entry.top for entry in one_by_one]
    assert _batched(logits, tokens, [0] * 6)[2].top == ()


def test_sorting_whole_rows_gives_the_tokens_of_the_windows(monkeypatch):
    rng = random.Random(3)
    logits = torch.randn(40, 33_000) * 2
    best = logits.max(dim=-1).values
    params = [
        SamplingParams(
            max_tokens=1,
            temperature=rng.choice([0.5, 1.0]),
            top_k=rng.choice([0, 5, 300]),
            top_p=rng.choice([0.3, 0.95, 1.0]),
            min_p=rng.choice([0.0, 0.1]),
        )
        for _ in range(40)
    ]
    dices = [rng.random() for _ in range(40)]
    staging = Staging(torch.device("cpu"), torch.float64)
    draws = make_draws(params, dices, range(40), 33_000, staging)
    assert 0 < len(draws.whole) < 40
    with_windows = draw.draw(logits, best, draws)
    monkeypatch.setattr(draw, "_WINDOWS", ())
    assert torch.equal(draw.draw(logits, best, draws), with_windows)


def test_staging_keeps_the_order_of_its_parts():
    staging = Staging(torch.device("cpu"), torch.int64)
    a, b, c = staging.put([1, 2], [], range(3))
    assert [a.tolist(), b.tolist(), c.tolist()] == [[1, 2], [], [0, 1, 2]]
    out = torch.full((6,), -1)
    staging.write(out, [7], [8, 9])
    assert out.tolist() == [7, 8, 9, -1, -1, -1]
