"""One request inside the engine: tokens, counters and where it stands.

add ---------> WAITING --> RUNNING --> FINISHED
                    ^------'  |
                    preempted `------> HELD --> (released)     prefill_only
add_remote --> WAITING --> AWAITING --> RUNNING                KV comes from a peer
"""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from core.block_hash import following_hashes, root_hash
from core.errors import RequestError
from core.types import FinishReason, GenerationRequest, Pooling, SamplingParams

if TYPE_CHECKING:  # it needs torch, and the planner's simulation has none
    from engine.grammar import Matcher


class SequenceState(Enum):
    WAITING = "waiting"  # owns no block
    RUNNING = "running"  # is scheduled: computes prompt or decodes
    HELD = "held"  # a finished prefill whose blocks stay pinned for a peer
    AWAITING = "awaiting"  # has its blocks; a peer's KV is on its way into them
    FINISHED = "finished"  # owns no block, unknown to the engine


@dataclass(slots=True, eq=False)
class Sequence:
    """Counters of one request; only the scheduler and the engine change them.

    `token_ids` only grows. KV exists for the first `num_computed_tokens` of them; the token that
    was sampled last has none yet. `block_table` covers at least the computed tokens. While
    `is_prefilling`, tokens below `num_prefill_tokens` are computed in chunks; afterwards one
    token a step.
    """

    request: GenerationRequest
    arrival: int  # order of arrival in this engine
    added_at: float  # monotonic seconds
    prefill_only: bool = False  # ends, or is held, at its first token
    hold: bool = False  # with prefill_only: pin the blocks after the first token
    wants_remote_kv: bool = False  # until a peer's KV has arrived, or is given up
    queue_seconds: float = 0.0  # from `added_at` to the step that admitted it first

    state: SequenceState = SequenceState.WAITING
    was_admitted: bool = False  # waits for the second time if it waits: preempted or fallen back
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0  # as of the last admission
    num_cached_tokens: int = 0  # found in the prefix cache at the last admission
    num_registered_blocks: int = 0  # first blocks that the prefix cache was offered, or never is
    block_table: list[int] = field(default_factory=list)
    sampler_state: Any = None  # the sampler's own; survives preemption
    draft: list[int] = field(default_factory=list)  # guessed tokens of the step that runs
    proposer_state: Any = None  # the proposer's own, as long as the sequence has its blocks
    num_failed_drafts: int = 0  # in a row, without one right token
    num_paused_steps: int = 0  # that it still does without a draft
    # Of the prompt's logprobs, the first so many (from its second token on) are done.
    num_prompt_logprobs: int = 0
    # Of a prompt to embed: the sum of the hidden states that count, and of how many positions.
    pooled: Any = None  # float32 [hidden_size]
    num_pooled: int = 0
    matcher: "Matcher | None" = None  # has accepted every output token; survives preemption

    _block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        if self.wants_remote_kv:  # who computes the prompt reports them
            self.num_prompt_logprobs = self.num_prompt_tokens - 1

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of its prompt's logprobs are still due."""
        if self.sampling.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def needs_every_row(self) -> bool:
        """What it is asked for cannot be had of tokens that the prefix cache holds."""
        return self.wants_prompt_logprobs or self.sampling.pooling is Pooling.MEAN

    def append(self, token_id: int) -> bool:
        """One more output token, wherever it was sampled. False: its grammar forbids it."""
        self.token_ids.append(token_id)
        return self.matcher is None or self.matcher.accept(token_id)

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first `num_blocks` full blocks; each is computed once in the
        life of the sequence."""
        hashes = self._block_hashes
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else root_hash(block_size, self.request.cache_salt)
            tokens = self.token_ids[len(hashes) * block_size : num_blocks * block_size]
            hashes += following_hashes(parent, tokens, block_size)
        return hashes[:num_blocks]

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why the sequence ends with the token that it got last, if it does. A stop token, and a
        grammar that nothing can follow, win over a limit that is reached by the same token."""
        if self.token_ids[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.is_finished:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError for what could not be computed here, or would harm others."""
    params, num_tokens = request.sampling, len(request.token_ids)
    if not request.prompt_token_ids:
        raise RequestError("the prompt has no tokens", param="prompt")
    asks_of_prompt = params.prompt_logprobs is not None or params.pooling is not None
    is_scored_only = params.max_tokens == 0 and asks_of_prompt
    if params.pooling is not None and params.max_tokens:
        raise RequestError("an embedding goes with max_tokens 0", param="max_tokens")
    if num_tokens + (not is_scored_only) > max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens and leaves no room for an answer: the context "
            f"holds {max_model_len} tokens, prompt and output together",
            param="prompt",
            code="context_length_exceeded",
        )
    if len(request.output_token_ids) >= params.max_tokens + is_scored_only:
        raise RequestError("max_tokens leaves nothing to generate", param="max_tokens")
    check_token_ids(request.token_ids, vocab_size, "prompt")
    check_token_ids(tuple(params.logit_bias), vocab_size, "logit_bias")
    if not all(math.isfinite(value) for value in params.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite", param="logit_bias")
    for name, is_usable in (
        ("temperature", 0 <= params.temperature < math.inf),
        ("repetition_penalty", 0 < params.repetition_penalty < math.inf),
        ("presence_penalty", math.isfinite(params.presence_penalty)),
        ("frequency_penalty", math.isfinite(params.frequency_penalty)),
        ("logprobs", params.logprobs is None or params.logprobs >= 0),
        ("prompt_logprobs", params.prompt_logprobs is None or params.prompt_logprobs >= 0),
    ):
        if not is_usable:
            raise RequestError(f"{name} has a value without a meaning", param=name)


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise RequestError(
            f"{param} has a token id outside the vocabulary of {vocab_size}", param=param
        )
