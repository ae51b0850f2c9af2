"""Length distributions, as a person writes them."""

from dataclasses import dataclass

import numpy as np

from core.errors import ConfigError

_FORMS = "N, normal:MEAN:STD, lognormal:MEDIAN:SIGMA or uniform:LOW:HIGH"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Numbers of tokens, at least 1. `kind` and what its parameters mean: see `parse_length`."""

    kind: str
    first: float
    second: float = 0.0

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        if self.kind == "fixed":
            return [int(self.first)] * count
        if self.kind == "normal":
            values = rng.normal(self.first, self.second, count)
        elif self.kind == "lognormal":
            values = rng.lognormal(np.log(self.first), self.second, count)
        else:
            return [int(n) for n in rng.integers(int(self.first), int(self.second) + 1, count)]
        return [max(1, int(value)) for value in np.rint(values)]


def parse_length(text: str, option: str) -> LengthDistribution:
    """`512`; `normal:512:128` (mean, standard deviation); `lognormal:512:0.8` (median, standard
    deviation of the logarithm); `uniform:64:1024` (both ends included). Raises ConfigError."""
    kind, *numbers = text.strip().split(":")
    if not numbers:
        kind, numbers = "fixed", [kind]
    problem = ConfigError(f"{option} {text}: expected {_FORMS}")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise problem from None
    if kind not in ("fixed", "normal", "lognormal", "uniform"):
        raise problem
    if len(values) != (1 if kind == "fixed" else 2) or not all(np.isfinite(values)):
        raise problem
    if values[0] < 1 or (kind != "uniform" and values[-1] < 0):
        raise ConfigError(f"{option} {text}: a length is at least 1, a deviation at least 0")
    if kind in ("fixed", "uniform") and any(value != int(value) for value in values):
        raise ConfigError(f"{option} {text}: expected whole numbers")
    if kind == "uniform" and values[1] < values[0]:
        raise ConfigError(f"{option} {text}: the upper end is below the lower one")
    return LengthDistribution(kind, *values)
