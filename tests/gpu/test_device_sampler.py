"""The sampler on a GPU: the CPU's tokens, and no wait for the GPU on the way."""

import random
from contextlib import contextmanager

import pytest
import torch

from engine.draw import draw, make_draws
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.staging import Staging
from support.mock_model import make_request

VOCAB = 32_000


def sequences(count, seed):
    rng = random.Random(seed)
    return [
        Sequence(
            make_request(
                "r",
                [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
                output=[rng.randrange(20) for _ in range(rng.randint(0, 10))],
                max_tokens=100,
                seed=rng.getrandbits(64),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_k=rng.choice([0, 0, 50]),
                top_p=rng.choice([1.0, 0.9]),
                min_p=rng.choice([0.0, 0.05]),
                frequency_penalty=rng.choice([0.0, 0.7]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                logit_bias=rng.choice([{}, {3: 5.0}]),
                logprobs=rng.choice([None, 3]),
            ),
            arrival=0,
            added_at=0.0,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_the_same_dice_give_the_same_tokens(seed, device):
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    on_cpu = Sampler().sample(logits, sequences(64, seed))
    on_gpu = Sampler().sample(logits.to(device), sequences(64, seed))
    # An exponential may differ in its last bit, and a number drawn on that very edge.
    same = sum(a == b for a, b in zip(on_cpu.token_ids, on_gpu.token_ids, strict=True))
    assert same >= 63
    for ours, theirs in zip(on_gpu.logprobs, on_cpu.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4) or same < 64
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_drawing_does_not_wait_for_the_gpu(device):
    chosen = [s.sampling for s in sequences(32, 1) if s.sampling.temperature]
    logits = torch.randn(len(chosen), VOCAB, device=device)
    staging = Staging(device, torch.float64)
    torch.cuda.synchronize()
    with no_waiting():
        draws = make_draws(chosen, [0.3] * len(chosen), range(len(chosen)), VOCAB, staging)
        token_ids = draw(logits, logits.max(dim=-1).values, draws)
    assert token_ids.is_cuda and int(token_ids.min()) >= 0 and int(token_ids.max()) < VOCAB


def test_staging_brings_what_it_was_given_to_one_place(device):
    staging = Staging(device, torch.int64, capacity=100)
    places = set()
    for step in range(50):
        a, b, c = staging.put([step, 1], [], range(3))
        assert [a.tolist(), b.tolist(), c.tolist()] == [[step, 1], [], [0, 1, 2]]
        places.add((a.data_ptr(), c.data_ptr()))
    assert len(places) == 1
    (many,) = staging.put(range(1000))
    assert many.tolist() == list(range(1000))
    out = torch.full((6,), -1, device=device)
    staging.write(out, [7], [8, 9])
    assert out.tolist() == [7, 8, 9, -1, -1, -1]
