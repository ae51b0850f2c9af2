"""From measured step times to a `FittedModel`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import ConfigError
from planner.step_model import FittedModel


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prefill step of `batch` equal prompts, of which `num_cached` tokens were known."""

    batch: int
    num_prompt: int
    num_cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One decode step of `batch` sequences with `context` tokens each."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how far it is from its points: relative errors of both phases together."""

    model: FittedModel
    median_error: float
    max_error: float


def fit(prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint]) -> Fit:
    """Least squares of relative errors, coefficients not negative. Raises ConfigError when
    there are too few points."""
    if len(prefills) < 3 or len(decodes) < 3:
        raise ConfigError(
            f"a fit needs three prefill and three decode steps, got {len(prefills)} and "
            f"{len(decodes)}"
        )
    rows = []
    for p in prefills:
        new = p.num_prompt - p.num_cached
        rows.append((1.0, p.batch * new, p.batch * (new * p.num_cached + new * new / 2)))
    prefill = _least_squares(rows, [p.seconds * 1e3 for p in prefills])
    decode = _least_squares(
        [(1.0, d.batch, d.batch * d.context) for d in decodes], [d.seconds * 1e3 for d in decodes]
    )
    model = FittedModel(prefill[0], prefill[1], prefill[2], decode[0], decode[1], decode[2])
    errors = [
        abs(model.step(int(row[1]), row[2], 0, 0) / p.seconds - 1)
        for p, row in zip(prefills, rows, strict=True)
    ]
    errors += [
        abs(model.step(0, 0.0, d.batch, d.batch * d.context) / d.seconds - 1) for d in decodes
    ]
    return Fit(model, float(np.median(errors)), max(errors))


def _least_squares(rows: Sequence[tuple[float, ...]], times: Sequence[float]) -> list[float]:
    """Weighted so that each point counts by its relative error. A coefficient that comes out
    negative is noise: it becomes 0 and the others are fitted again."""
    y = np.asarray(times, dtype=float)
    x = np.asarray(rows, dtype=float) / y[:, None]
    kept = list(range(x.shape[1]))
    while True:
        solution = np.linalg.lstsq(x[:, kept], np.ones_like(y), rcond=None)[0]
        if (solution >= 0).all():
            break
        del kept[int(solution.argmin())]
    coefficients = [0.0] * x.shape[1]
    for column, value in zip(kept, solution, strict=True):
        coefficients[column] = float(value)
    return coefficients
