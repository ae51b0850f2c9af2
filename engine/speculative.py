"""Speculative decoding: guesses of what a sequence will say next, checked in one forward.

The model gets the guessed tokens with the last one and says at each of their positions what plain
sampling would have chosen there; the guess counts as far as it agrees. Noise is a function of
(seed, position), so that not only greedy but sampled output too is what it is without a guess.
"""

from array import array

import numpy as np

from core.config import SpeculativeConfig
from engine.sequence import Sequence


class NgramProposer:
    """Prompt lookup: what stood last time behind the last few tokens will follow again.

    The longest repeated end wins, from `prompt_lookup_max` tokens down to `prompt_lookup_min`; of
    several places the latest one with enough tokens behind it. (Saxena, "Prompt Lookup
    Decoding", 2023.)
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, seq: Sequence, limit: int) -> list[int]:
        """At most `num_tokens` and `limit` tokens that may follow; often none."""
        limit = min(limit, self._config.num_tokens)
        if limit < 1:
            return []
        history = seq.draft_history
        if history is None:
            history = seq.draft_history = array("i")
        history.extend(seq.token_ids[len(history) :])
        draft = _lookup(np.frombuffer(history, dtype=np.int32), limit, self._config)
        # Nothing is sampled behind a stop token, and what a grammar forbids cannot be said.
        for index, token_id in enumerate(draft):
            if token_id in seq.sampling.stop_token_ids:
                draft = draft[:index]
                break
        return draft if seq.matcher is None else seq.matcher.valid_prefix(draft)


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
