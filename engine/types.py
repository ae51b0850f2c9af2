"""What goes into the engine and what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from core.types import FinishReason, TokenLogprobs
from engine.attention.base import StepBatch


@dataclass(slots=True)
class SequenceOutput:
    """What one engine step did for one sequence. A step returns one for every sequence that was
    admitted, computed prompt tokens for a hand-over, sampled, or ended."""

    request_id: str
    # New tokens sampled in this step, with their logprobs if asked for.
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    # Of prompt tokens, each once and in order from the prompt's second token on.
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""  # with the finish reason, if asked for: little-endian float32
    # Set once, in the step that gave the sequence its blocks.
    admitted: bool = False
    # With `admitted`, if a peer has to know: of a prefill_only or remote sequence.
    block_table: list[int] | None = None
    num_cached_tokens: int = 0  # with `admitted`: found in this engine's prefix cache
    queue_seconds: float = 0.0  # with `admitted`: from add to admission, this step left out
    step_seconds: float = 0.0  # that this step took, with all its sequences
    # Tokens whose KV is final, after this step.
    num_computed_tokens: int = 0
    error: str | None = None  # the engine could not go on with this sequence


BeforeModel = Callable[[list[SequenceOutput]], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now."""

    requests_running: int
    requests_waiting: int
    waiting_prefill_tokens: int
    tokens_prefilled_total: int
    tokens_decoded_total: int
    prefix_hit_tokens_total: int
    preemptions_total: int
    tokens_drafted_total: int
    tokens_draft_accepted_total: int
    draft_pauses_total: int
    # Moving figures, 0 before the first measurement: see `engine.meter`.
    prefill_tokens_per_second: float
    decode_step_seconds: float
    decode_sequence_seconds: float


class ModelLimits(Protocol):
    """What the engine needs to know of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


class Maxima(NamedTuple):
    """Of each row of logits."""

    best: torch.Tensor  # float32 [R], the greatest; NaN counts as that
    places: torch.Tensor  # int64 [R], the first place that has it


class Model(Protocol):
    """A decoder over the paged KV cache. `bind` is called once, before the first `forward`."""

    @property
    def config(self) -> ModelLimits: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    @property
    def maxima(self) -> Maxima | None:
        """Of what `forward` returned last, if it has seen them on its way."""

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """(num_layers, 2, num_kv_heads, block_size, row), or (num_layers, 1, 1, block_size, row)
        for latent attention: see `engine.attention.base`."""

    def bind(self, kv_cache: torch.Tensor) -> None:
        """`kv_cache`: [num_blocks, *kv_block_shape]. The engine keeps it alive and in place."""

    def forward(
        self,
        input_ids: torch.Tensor,  # int64 [T]
        positions: torch.Tensor,  # int64 [T]
        batch: StepBatch,
        logits_rows: torch.Tensor,  # int64 [R], R may be 0
    ) -> torch.Tensor:
        """Writes the KV of all T tokens; float32 logits [R, vocab_size] of the tokens named."""


@runtime_checkable
class PooledModel(Protocol):
    """A model whose final hidden states can be had: `forward` in two parts."""

    def hidden_states(
        self,
        input_ids: torch.Tensor,  # int64 [T]
        positions: torch.Tensor,  # int64 [T]
        batch: StepBatch,
        rows: torch.Tensor,  # int64 [R]
    ) -> torch.Tensor:
        """Writes the KV of all T tokens; [R, hidden_size], after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, vocab_size] of what `hidden_states` returned."""
