"""Against a plain reference: one row at a time, sorted whole, in float64."""

import math
import random

import numpy as np
import pytest
import torch

from core.types import TokenLogprobs
from engine.sampler import Sampler, dice
from engine.sequence import Sequence
from support.mock_model import make_request

VOCAB = 997


def make_sequence(prompt=(1, 2, 3), output=(), **sampling) -> Sequence:
    sampling.setdefault("max_tokens", 100)
    request = make_request("r", prompt, output=output, **sampling)
    return Sequence(request, arrival=0, added_at=0.0)


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int | None]:
    return Sampler().sample(logits, sequences).token_ids


def rows(count: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(row: torch.Tensor, seq: Sequence) -> np.ndarray:
    p, x = seq.sampling, row.double().numpy().copy()
    output = seq.token_ids[seq.num_prompt_tokens :]
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(seq.token_ids):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    if len(output) < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
    return x


def kept_tokens(x: np.ndarray, seq: Sequence) -> dict[int, float]:
    """Weights of the tokens that may be drawn, in vocabulary order."""
    p = seq.sampling
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k:
        order = order[: p.top_k]
    weights = [math.exp((x[i] - x[order[0]]) / p.temperature) for i in order]
    if p.top_p < 1:
        limit, total, count = p.top_p * sum(weights), 0.0, 0
        while count == 0 or (count < len(order) and total < limit):
            total += weights[count]
            count += 1
        order, weights = order[:count], weights[:count]
    kept = [(i, w) for i, w in zip(order, weights, strict=True) if w >= p.min_p]
    return dict(sorted(kept))


def reference(row: torch.Tensor, seq: Sequence) -> int:
    x = adjusted(row, seq)
    if seq.sampling.temperature == 0:
        return int(np.argmax(x))
    kept = kept_tokens(x, seq)
    rest = dice(seq.sampling.seed, len(seq.token_ids)) * sum(kept.values())
    for token, weight in kept.items():
        rest -= weight
        if rest < 0:
            return token
    raise AssertionError("the dice are past the end")


def random_sequence(rng: random.Random, vocab: int = VOCAB) -> Sequence:
    return make_sequence(
        prompt=[rng.randrange(vocab) for _ in range(rng.randint(1, 30))],
        output=[rng.randrange(20) for _ in range(rng.randint(0, 10))],
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 50, 200, 600]),
        top_p=rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        logit_bias=rng.choice([{}, {}, {3: 5.0, 7: -100.0}]),
        min_tokens=rng.choice([0, 6]),
        stop_token_ids=(5, 6),
    )


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_equal_the_reference(seed):
    rng = random.Random(seed)
    vocab = rng.choice([61, VOCAB, 5000])
    sequences = [random_sequence(rng, vocab) for _ in range(20)]
    logits = rows(20, seed, vocab)
    expected = [reference(row, seq) for row, seq in zip(logits, sequences, strict=True)]
    assert sample(logits, *sequences) == expected


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_broken_by_the_lower_id_in_window_and_full_sort(seed):
    rng = random.Random(seed)
    sequences = [random_sequence(rng, 5000) for _ in range(20)]
    logits = rows(20, seed, 5000).mul(0.5).round()  # a dozen distinct values
    expected = [reference(row, seq) for row, seq in zip(logits, sequences, strict=True)]
    assert sample(logits, *sequences) == expected


def test_a_flat_row_needs_more_than_the_window():
    logits = torch.zeros(2, 5000)
    sequences = [
        make_sequence(temperature=1.0, top_p=0.5, seed=1),
        make_sequence(temperature=1.0, top_k=2, seed=2),
    ]
    first, second = sample(logits, *sequences)
    assert first == reference(logits[0], sequences[0]) == int(dice(1, 3) * 2500)
    assert second == int(dice(2, 3) * 2)


@pytest.mark.parametrize("spread", [0.02, 0.6, 3.0])  # decided in the full sort, window 2, 1
def test_every_window_keeps_the_same_tokens(spread):
    logits = rows(3, vocab=33_000) * spread
    sequences = [
        make_sequence(temperature=1.0, top_p=top_p, top_k=top_k, seed=top_k)
        for top_p, top_k in ((0.5, 0), (0.5, 1500), (0.9, 100))
    ]
    expected = [reference(row, seq) for row, seq in zip(logits, sequences, strict=True)]
    assert sample(logits, *sequences) == expected


def test_greedy_is_the_first_maximum_whatever_the_filters_say():
    logits = torch.zeros(3, VOCAB)
    logits[:, [40, 50]] = 4.0
    filters = [{}, {"top_p": 0.0, "top_k": 7}, {"min_p": 1.0, "top_p": 0.9, "seed": 9}]
    assert sample(logits, *[make_sequence(**f) for f in filters]) == [40, 40, 40]


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = rows(1)
    for top_p in (1.0, 0.9):
        seq = make_sequence(temperature=temperature, top_p=top_p)
        assert sample(logits, seq) == [int(logits.argmax())]


def test_top_p_near_zero_keeps_the_best_token_alone():
    logits = rows(1)
    sequences = [make_sequence(temperature=2.0, top_p=p, seed=5) for p in (0.0, 1e-6)]
    assert sample(logits.expand(2, -1), *sequences) == [int(logits.argmax())] * 2


def test_min_p_of_one_and_more_keeps_the_best_token():
    logits = rows(1)
    sequences = [make_sequence(temperature=2.0, min_p=p, seed=5) for p in (1.0, 3.0)]
    assert sample(logits.expand(2, -1), *sequences) == [int(logits.argmax())] * 2


def test_the_draw_follows_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -50.0]])
    count = 4000
    sequences = [
        make_sequence(prompt=[0] * (1 + i % 40), temperature=1.0, seed=i // 40)
        for i in range(count)
    ]
    drawn = sample(logits.expand(count, -1), *sequences)
    for token, probability in enumerate(logits[0].softmax(-1).tolist()):
        deviation = abs(drawn.count(token) - count * probability)
        assert deviation <= 4 * math.sqrt(count * probability * (1 - probability)) + 1e-6


def test_dice_are_a_pure_function_of_seed_and_position():
    # Written down: a change would break resuming a stream on a worker of another version.
    assert [dice(0, 0), dice(42, 7), dice(2**64 - 1, 1_000_000)] == [
        pytest.approx(value, abs=1e-15)
        for value in (0.5056324219410687, 0.36825055238232873, 0.26368345232754453)
    ]
    values = [dice(seed, position) for seed in range(50) for position in range(40)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.03)


def test_same_dice_in_any_batch_and_order():
    """V29: one seeded sequence among random neighbours."""
    logits = rows(16, seed=3, vocab=5000)
    for sampling in ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}):
        mine = {"temperature": 0.9, "seed": 42, **sampling}
        alone = sample(logits[:1], make_sequence(**mine))
        for trial in range(20):
            rng = random.Random(trial)
            place = rng.randrange(16)
            sequences = [random_sequence(rng, 5000) for _ in range(16)]
            sequences[place] = make_sequence(**mine)
            batch = logits.clone()
            batch[place] = logits[0]
            assert sample(batch, *sequences)[place] == alone[0]


def test_penalties_count_what_they_should_at_the_first_and_second_token():
    """V42: presence and frequency see the output alone, repetition the prompt as well."""
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, [7, 8]] = torch.tensor([2.0, 1.5])
    for penalty in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}):
        seq = make_sequence(prompt=[7, 7, 7], **penalty)
        assert sample(logits, seq) == [7]
        seq.token_ids.append(7)
        assert sample(logits, seq) == [8]
    seq = make_sequence(prompt=[7, 7, 7], repetition_penalty=2.0)
    assert sample(logits, seq) == [8]
    seq.token_ids.append(8)
    assert sample(logits, seq) == [7]


def test_penalty_counts_grow_with_the_tokens_as_if_made_at_once():
    rng = random.Random(7)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    seq = make_sequence(prompt=[1, 2, 3], **penalties)
    for step in range(12):
        logits = rows(1, seed=step) / 3
        output = seq.token_ids[3:]
        fresh = make_sequence(prompt=[1, 2, 3], output=output, **penalties)
        assert sample(logits, seq) == sample(logits, fresh) == [reference(logits[0], seq)]
        seq.token_ids += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_bans_or_forces(temperature):
    logits = rows(1)
    best = int(logits.argmax())
    forced = make_sequence(temperature=temperature, logit_bias={11: 100.0})
    banned = make_sequence(temperature=temperature, logit_bias={best: -100.0})
    assert sample(logits, forced) == [11]
    assert sample(logits, banned) != [best]


def test_min_tokens_bans_stop_tokens_until_they_may_come():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    seq = make_sequence(min_tokens=2, stop_token_ids=(5, VOCAB + 3), logit_bias={5: 100.0})
    tokens = []
    for _ in range(3):
        tokens += sample(logits, seq)
        seq.token_ids.append(tokens[-1])
    assert tokens == [0, 0, 5]


def test_the_logits_are_left_as_they_are():
    logits = rows(2)
    before = logits.clone()
    sample(
        logits,
        make_sequence(logit_bias={3: 5.0}, repetition_penalty=2.0),
        make_sequence(temperature=0.5, top_p=0.5, min_tokens=3, stop_token_ids=(1,)),
    )
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_distribution_and_only_for_those_who_ask():
    logits = rows(4)
    sequences = [
        make_sequence(),
        make_sequence(logprobs=3, temperature=0.3, logit_bias={11: 100.0}),
        make_sequence(logprobs=0),
        make_sequence(logprobs=VOCAB + 5),
    ]
    output = Sampler().sample(logits, sequences)
    expected = logits.double().log_softmax(-1)
    assert output.logprobs[0] is None
    biased = output.logprobs[1]
    assert output.token_ids[1] == 11
    assert biased.logprob == pytest.approx(expected[1, 11].item(), abs=1e-5)
    best = expected[1].sort(descending=True)
    assert [token for token, _ in biased.top] == best.indices[:3].tolist()
    assert [p for _, p in biased.top] == pytest.approx(best.values[:3].tolist(), abs=1e-5)
    assert output.logprobs[2].top == ()
    assert len(output.logprobs[3].top) == VOCAB


def test_top_logprobs_break_ties_by_the_lower_id():
    logits = torch.zeros(1, 6)
    logits[0, 4] = 1.0
    result = Sampler().sample(logits, [make_sequence(logprobs=3)]).logprobs[0]
    assert isinstance(result, TokenLogprobs)
    assert [token for token, _ in result.top] == [4, 0, 1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(sampling, value):
    logits = rows(3)
    logits[1, 17] = value
    sequences = [make_sequence(logprobs=1, **sampling) for _ in range(3)]
    output = Sampler().sample(logits, sequences)
    assert output.token_ids[1] is None
    assert output.logprobs[1] is None
    alone = [sample(logits[[row]], sequences[row])[0] for row in (0, 2)]
    assert [output.token_ids[0], output.token_ids[2]] == alone
