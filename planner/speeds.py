"""What a simulated worker would have measured of itself."""

from planner.step_model import StepModel
from router.placement.policy import Speeds

_CONTEXT = 1024  # tokens of each sequence that decodes
_BATCH = 33


def speeds_of(model: StepModel, step_tokens: int) -> Speeds:
    """Of steps full of prompt, and of a line through two sizes of the decode batch."""
    prefill = step_tokens / model.step(step_tokens, step_tokens * step_tokens / 2, 0, 0)
    one = model.step(0, 0.0, 1, _CONTEXT)
    many = model.step(0, 0.0, _BATCH, _BATCH * _CONTEXT)
    slope = max((many - one) / (_BATCH - 1), 0.01 * one)
    return Speeds(prefill, one - slope, slope)
