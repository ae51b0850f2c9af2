"""What is sent and what comes back, one value for each request. All times are seconds on one
monotonic clock, counted from the start of the run."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Equal keys have equal content, so prompts that begin with the same
    segments begin alike."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload. `at_s` is its scheduled arrival; None in a closed loop, where a
    request is due when the one before it has ended."""

    index: int
    prompt: tuple[Segment, ...]
    num_output_tokens: int
    at_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.prompt)


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it.

    `token_times_s` has one entry for each chunk that carried tokens. `error` is None, or the kind
    of error; then the other numbers are what was there until it happened.
    `is_interrupted`: the run was stopped before the request ended; it is counted nowhere."""

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    wanted_prompt_tokens: int = 0
    wanted_output_tokens: int = 0
    prompt_tokens: int | None = None  # as the server counted them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    detail: str = ""
    is_interrupted: bool = False

    @property
    def is_ok(self) -> bool:
        return self.error is None and not self.is_interrupted

    @property
    def num_prompt_tokens(self) -> int:
        return self.wanted_prompt_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """The server's count; without one, a chunk is taken for a token."""
        return self.output_tokens or len(self.token_times_s)

    @property
    def send_delay_s(self) -> float:
        """How late the client was."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        """From the sending to the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def ttft_scheduled_s(self) -> float:
        """From the scheduled arrival to the first token: a late client hides nothing."""
        return self.token_times_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """From the sending to the last token."""
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (output tokens - 1); None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """ITL: each gap between two chunks."""
        times = self.token_times_s
        return [b - a for a, b in zip(times, times[1:], strict=False)]
