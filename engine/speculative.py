"""Speculative decoding: guesses of what a sequence will say next, checked in one forward.

The model gets the guessed tokens with the last one and says at each of their positions what plain
sampling would have chosen there; the guess counts as far as it agrees. Noise is a function of
(seed, position), so that not only greedy but sampled output too is what it is without a guess.
"""

from array import array
from typing import Protocol

import numpy as np

from core.config import SpeculativeConfig
from engine.scheduler import MakeRoom
from engine.sequence import Sequence

# After so many drafts in a row without one right token a sequence does without for some steps:
# 16, then 32, ... up to the limit, until a guess is right again.
_FAILURES_BEFORE_PAUSE = 8
_PAUSE_STEPS, _MAX_PAUSE_STEPS = 16, 128

Wants = list[tuple[Sequence, int]]  # with the most tokens that a guess may have, at least one


class Proposer(Protocol):
    """A method of guessing."""

    def propose(self, wants: Wants, budget: int, make_room: MakeRoom) -> int:
        """Sets `draft` of these sequences, which is empty before, and returns how many tokens of
        the budget that takes. A draft has room, no stop token, and holds to the grammar."""
        ...


class Speculation:
    """Decides who guesses in a step, and counts how that went."""

    def __init__(self, proposer: Proposer, num_tokens: int, max_model_len: int) -> None:
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._max_model_len = max_model_len
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_pauses = 0

    def propose(self, sequences: list[Sequence], budget: int, make_room: MakeRoom) -> int:
        """A `scheduler.Propose`. No guess goes where a plain step would not: the last token
        needs none."""
        wants = []
        for seq in sequences:
            seq.draft = []
            if seq.num_paused_steps:
                seq.num_paused_steps -= 1
                continue
            left = min(
                seq.sampling.max_tokens - seq.num_output_tokens,
                self._max_model_len - len(seq.token_ids),
            )
            if left > 1:
                wants.append((seq, min(self._num_tokens, left - 1)))
        return self._proposer.propose(wants, budget, make_room) if wants and budget else 0

    def observe(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft of at least one token."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_accepted:
            seq.num_failed_drafts = 0
            return
        seq.num_failed_drafts += 1
        pauses = seq.num_failed_drafts - _FAILURES_BEFORE_PAUSE
        if pauses >= 0:  # each draft after a pause that fails too doubles the next one
            seq.num_paused_steps = min(_PAUSE_STEPS << min(pauses, 10), _MAX_PAUSE_STEPS)
            self.num_pauses += 1


def usable_prefix(seq: Sequence, draft: list[int]) -> list[int]:
    """Nothing is sampled behind a stop token, and what a grammar forbids cannot be said."""
    for index, token_id in enumerate(draft):
        if token_id in seq.sampling.stop_token_ids:
            draft = draft[:index]
            break
    return draft if seq.matcher is None else seq.matcher.valid_prefix(draft)


class NgramProposer:
    """Prompt lookup: what stood last time behind the last few tokens will follow again.

    The longest repeated end wins, from `prompt_lookup_max` tokens down to `prompt_lookup_min`; of
    several places the latest one with enough tokens behind it. (Saxena, "Prompt Lookup
    Decoding", 2023.)
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, wants: Wants, budget: int, make_room: MakeRoom) -> int:
        used = 0
        for seq, limit in wants:
            limit = min(limit, budget - used)
            if limit < 1:
                break
            draft = usable_prefix(seq, self._guess(seq, limit))
            seq.draft = draft[: make_room(seq, len(draft))] if draft else []
            used += len(seq.draft)
        return used

    def _guess(self, seq: Sequence, limit: int) -> list[int]:
        history = seq.proposer_state
        if history is None:
            history = seq.proposer_state = array("i")
        history.extend(seq.token_ids[len(history) :])
        return _lookup(np.frombuffer(history, dtype=np.int32), limit, self._config)


def _lookup(tokens: np.ndarray, limit: int, config: SpeculativeConfig) -> list[int]:
    """`tokens`: int32 [num_tokens]."""
    size, length, best = len(tokens), 1, None
    places = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the end's last token stood before
    while len(places):  # where its last `length` tokens did
        if length >= config.prompt_lookup_min:
            best = places
        if length == config.prompt_lookup_max:
            break
        length += 1
        places = places[places >= length - 1]
        places = places[tokens[places - length + 1] == tokens[size - length]]
    if best is None:
        return []
    # The latest one that has enough behind it; the first has most.
    enough = best[best + limit < size]
    place = int(enough[-1] if len(enough) else best[0])
    return tokens[place + 1 : place + 1 + limit].tolist()
