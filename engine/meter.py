"""How fast the engine's steps have been lately."""

_PREFILL_DECAY = 0.9  # of what came before, with each step that computes prompts
_DECODE_DECAY = 0.98
_MIN_VARIANCE = 0.25  # of batch sizes, below which no slope can be told


class StepMeter:
    """Moving figures over the last tens of steps. All are 0 before the first measurement.

    Prefill speed is prompt tokens over the whole time of the steps that computed some, so that
    decoding beside them makes it slower, as it does for the next prompt. Steps that only decode
    are fitted with a line over the size of their batch.
    """

    def __init__(self) -> None:
        self._prompt_tokens = 0.0
        self._prompt_seconds = 0.0
        # Weighted sums over steps that only decode: of 1, n, t, n * n and n * t.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """One step: prompt tokens that it computed, and sequences that it decoded."""
        if num_prompt_tokens:
            self._prompt_tokens = _PREFILL_DECAY * self._prompt_tokens + num_prompt_tokens
            self._prompt_seconds = _PREFILL_DECAY * self._prompt_seconds + seconds
        elif num_decodes:
            n, t = num_decodes, seconds
            new = (1.0, n, t, n * n, n * t)
            self._sums = tuple(  # type: ignore[assignment]
                _DECODE_DECAY * old + value for old, value in zip(self._sums, new, strict=True)
            )

    @property
    def prefill_tokens_per_second(self) -> float:
        return self._prompt_tokens / self._prompt_seconds if self._prompt_seconds else 0.0

    @property
    def decode_line(self) -> tuple[float, float]:
        """(a, b): a step that decodes n sequences takes a + n * b seconds."""
        weight, sum_n, sum_t, sum_nn, sum_nt = self._sums
        if not weight:
            return 0.0, 0.0
        mean_n, mean_t = sum_n / weight, sum_t / weight
        variance = sum_nn / weight - mean_n * mean_n
        slope = 0.0
        if variance > _MIN_VARIANCE:
            slope = (sum_nt / weight - mean_n * mean_t) / variance
            slope = min(max(slope, 0.0), mean_t / mean_n)
        return mean_t - slope * mean_n, slope
