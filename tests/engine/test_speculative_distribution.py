"""Sampled output has the model's own distribution, guessed ahead or not: four tokens of many
seeds against the exact probabilities of all their combinations."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from core.config import EngineConfig, SpeculativeConfig
from engine.attention.base import StepBatch
from engine.engine import Engine
from support.mock_model import MockModel, make_request

VOCAB, PROMPT, NUM_SEEDS, LENGTH, TEMPERATURE = 3, [0, 1, 2, 0, 1], 1000, 4, 2.0
SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_tokens": 2, "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "d", "num_tokens": 2},
}


class NearlyRight(MockModel):
    """A draft whose distribution is close to the target's, and another one."""

    def _logits(self, table: list[int], position: int) -> torch.Tensor:
        return super()._logits(table, position) + torch.linspace(-1, 1, self.config.vocab_size)


class Believer(Engine):
    """Takes every guess for right."""

    def _advance_decode(self, seq: Any, samples: Any, outputs: Any) -> None:
        guessed = [(token, None) for token in seq.draft]
        super()._advance_decode(seq, [*guessed, *samples[len(guessed) :]], outputs)


@pytest.fixture(scope="module")
def exact() -> dict[tuple[int, ...], float]:
    """Probability of each combination of tokens after the prompt."""
    model = MockModel(VOCAB)
    model.bind(torch.zeros(1, *model.kv_block_shape(16), dtype=torch.int32))

    def probabilities(tokens: list[int]) -> list[float]:
        n = len(tokens)
        batch = StepBatch([n], [n], [[0]], 0)
        ids, at = torch.tensor(tokens), torch.arange(n)
        logits = model.forward(ids, at, batch, torch.tensor([n - 1]))[0]
        return torch.softmax(logits.double() / TEMPERATURE, -1).tolist()

    after = {
        head: probabilities([*PROMPT, *head])
        for n in range(LENGTH)
        for head in itertools.product(range(VOCAB), repeat=n)
    }
    return {
        tokens: math.prod(after[tokens[:i]][tokens[i]] for i in range(LENGTH))
        for tokens in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def sample(kind: str, engine_class: type[Engine] = Engine) -> tuple[list[tuple[int, ...]], Engine]:
    """The outputs of all seeds, many in a batch."""
    setting = SETTINGS[kind]
    config = EngineConfig(
        block_size=16,
        max_num_seqs=50,
        speculative=SpeculativeConfig(**setting) if setting else None,
    )
    draft = NearlyRight(VOCAB) if kind == "draft_model" else None
    engine = engine_class(MockModel(VOCAB), config, 128, draft=draft)
    tokens: dict[str, list[int]] = {}
    for seed in range(NUM_SEEDS):
        options: dict[str, Any] = {"max_tokens": LENGTH, "temperature": TEMPERATURE}
        engine.add(make_request(str(seed), PROMPT, seed=seed, **options))
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return [tuple(tokens[str(seed)]) for seed in range(NUM_SEEDS)], engine


def chi_square(outputs: list[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """In standard deviations from what chance gives; cells that expect few are one."""
    counts, rest, cells = Counter(outputs), [0.0, 0.0], []
    for tokens, probability in exact.items():
        expected = probability * len(outputs)
        if expected < 5:
            rest = [rest[0] + counts[tokens], rest[1] + expected]
        else:
            cells.append((counts[tokens], expected))
    if rest[1] > 0:
        cells.append((rest[0], rest[1]))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("kind", SETTINGS)
def test_four_tokens_follow_the_models_distribution(kind, exact):
    assert sum(exact.values()) == pytest.approx(1)
    outputs, engine = sample(kind)
    assert len(outputs) == NUM_SEEDS and abs(chi_square(outputs, exact)) < 4
    stats = engine.stats()
    if kind != "plain":
        assert 50 < stats.tokens_draft_accepted_total < stats.tokens_drafted_total
        assert outputs == sample("plain")[0]


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_the_test_sees_guesses_that_are_taken_unchecked(kind, exact):
    outputs, _ = sample(kind, Believer)
    assert chi_square(outputs, exact) > 10
