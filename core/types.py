"""Plain values that travel between router, workers and engine. Token ids only, never text."""

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a worker does. A colocated worker is a decode worker that prefills for itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class FinishReason(StrEnum):
    """Why a sequence ended. STOP covers EOS, stop tokens and, in the router, stop strings."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"


class Pooling(StrEnum):
    """Which final hidden states make a prompt's embedding: the mean of all, or the last one."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like as a text. `value` is the schema, the expression or the
    rules (with a `root`); nothing for a JSON object of any shape."""

    kind: GrammarKind
    value: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The router resolves every default, so nothing here is optional
    in meaning: `seed` is always set, EOS ids are part of `stop_token_ids` unless ignored.

    Order of application: logit_bias, repetition (prompt + output), presence and frequency
    (output only), min_tokens mask, grammar mask, temperature, top_k, top_p, min_p.
    """

    max_tokens: int  # 0 only with prompt_logprobs or pooling: nothing is sampled
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy, whatever top_k, top_p and min_p say
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # the noise at a position depends on (seed, position) alone
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None  # stop tokens are then allowed only where it may end
    # None: none; k: of every prompt token but the first its logprob and the k best there.
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None  # with max_tokens 0: the output is the prompt's embedding


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one sampled token under the model's raw distribution (before
    temperature and filters, as OpenAI and vLLM report it), and of the best tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, as one attempt.

    `request_id` is unique per attempt and chosen by the router; a client's own id never becomes
    one. `output_token_ids` are tokens that an earlier attempt has already emitted: they are
    computed like prompt, and count as output for max_tokens, penalties and sampling positions.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    client_request_id: str = ""  # correlation in logs only

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens whose KV must exist before the next token can be sampled."""
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True, slots=True)
class KVBlockCounts:
    """Blocks of one worker by state; total = the sum of the other five.

    free: no content. cached: reusable content, nobody's. running: of a sequence that is
    scheduled here. held: of a finished prefill, pinned for a decode worker.
    awaiting: reserved here for KV that is on its way."""

    total: int = 0
    free: int = 0
    cached: int = 0
    running: int = 0
    held: int = 0
    awaiting: int = 0
