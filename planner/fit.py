"""From measured step times to a `FittedModel`, and the file in which one travels."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


def save_profile(
    path: str | Path, models: dict[int, FittedModel], kv_tokens: dict[int, int]
) -> None:
    """By tensor-parallel degree: the coefficients in ms, and the KV tokens of a worker."""
    content = {
        str(tp): {**asdict(model), "kv_tokens": kv_tokens[tp]} for tp, model in models.items()
    }
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_profile(path: str | Path) -> tuple[dict[int, FittedModel], dict[int, int]]:
    """What `save_profile` wrote. Raises ConfigError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        models, kv_tokens = {}, {}
        for tp, entry in content.items():
            kv_tokens[int(tp)] = int(entry.pop("kv_tokens"))
            if entry.get("large") is not None:
                entry["large"] = tuple(entry["large"])
            models[int(tp)] = FittedModel(**entry)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a performance profile: {error}") from error
    if not models:
        raise ConfigError(f"{path}: a performance profile without a tensor-parallel degree")
    return models, kv_tokens
