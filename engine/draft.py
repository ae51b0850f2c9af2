"""Speculative decoding with a draft model: a smaller model of the same vocabulary guesses.

(Leviathan et al., arXiv:2211.17192; the check of the guesses is another here, see
`engine.speculative`.)
"""

import logging
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from core.errors import ModelError
from core.model_files import ModelFiles
from core.vocabulary import load_vocabulary
from engine.attention.base import StepBatch
from engine.sampler import Sampler
from engine.scheduler import MakeRoom
from engine.sequence import Sequence
from engine.speculative import Wants, usable_prefix
from engine.staging import Staging
from engine.types import Model

logger = logging.getLogger(__name__)


def require_same_vocabulary(target: ModelFiles, draft: ModelFiles) -> None:
    """Raises ModelError unless each token id means the same to both models. A table that is
    padded to another size does not matter."""
    ours, theirs = load_vocabulary(target), load_vocabulary(draft)
    for index, (our, their) in enumerate(zip_longest(ours.tokens, theirs.tokens, fillvalue=b"")):
        if our != their:
            raise ModelError(
                f"draft model {draft.name} has another vocabulary than {target.name}: token "
                f"{index} is {their!r}, not {our!r}; speculative.model must be of the same family"
            )


@dataclass(slots=True)
class _DraftState:
    """How far the draft model knows a sequence (`Sequence.proposer_state`)."""

    num_computed: int  # first tokens whose draft KV is in the blocks
    num_tagged: int  # first blocks that are full of it and tagged
    fed: list[int] = field(default_factory=list)  # guesses behind the last token, with KV too


@dataclass(slots=True)
class _Row:
    """One sequence in the forwards of one step."""

    seq: Sequence
    state: _DraftState
    token_ids: list[int]  # to feed next, from position `start` on
    start: int
    num_guesses: int  # 0: it only catches up


class DraftProposer:
    """Owns the draft model's KV, which lies in blocks of the same ids as the target's: one
    allocation, one prefix cache and one preemption serve both.

    - The target's KV may come from a peer or from the prefix cache; the draft model computes
      what it lacks itself, in chunks within the step's budget, before a sequence's first guess.
    - A full block is tagged with the hash of its content. The tag is dropped before anything
      else is written there, and a sequence believes in a block only by its own hash: that the
      pool has handed the block to somebody else in between needs no notice.
    - A block that sequences share may be written by each of them, with the same content.
    - Guesses are sampled from the draft's logits with the same dice, grammar and penalties as
      the target's tokens will be: a draft that equals the target is always right.
    - If the draft model fails, decoding goes on without it, for good.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        enable_prefix_caching: bool,
    ) -> None:
        shape = model.kv_block_shape(block_size)
        self.kv_cache = torch.zeros((num_blocks, *shape), dtype=model.kv_dtype, device=device)
        model.bind(self.kv_cache)
        self._model = model
        self._block_size = block_size
        self._vocab_size = vocab_size  # the target's
        self._staging = Staging(device, torch.int64)
        self._has_tags = enable_prefix_caching
        self._tags: list[bytes | None] = [None] * num_blocks
        self._sampler = Sampler()
        self.num_computed = 0  # tokens, guesses included
        self.has_failed = False

    @torch.inference_mode()
    def propose(self, wants: Wants, budget: int, make_room: MakeRoom) -> int:
        """Those who lack least come first, so that one long prompt stops nobody's guesses."""
        if self.has_failed:
            return 0
        by_lack = sorted(
            ((seq, limit, self._state(seq)) for seq, limit in wants),
            key=lambda want: len(want[0].token_ids) - want[2].num_computed,
        )
        rows, used = [], 0
        for seq, limit, state in by_lack:
            length, left = len(seq.token_ids), budget - used
            limit = min(limit, self._model.config.max_model_len - length)
            if limit < 1 or not left:
                continue
            num_tokens = min(length - state.num_computed, left)
            used += num_tokens
            is_complete = state.num_computed + num_tokens == length
            limit = min(limit, budget - used) if is_complete else 0
            limit = make_room(seq, limit) if limit else 0
            used += limit
            start, end = state.num_computed, state.num_computed + num_tokens
            rows.append(_Row(seq, state, seq.token_ids[start:end], start, limit))
        try:
            self._guess(rows)
        except Exception:
            logger.exception("the draft model failed: decoding goes on without it")
            self.has_failed = True
            for row in rows:
                row.seq.draft = []
        return used

    def _guess(self, rows: list[_Row]) -> None:
        """Catches up with one forward and guesses with it and those after it."""
        alive = rows
        while alive:
            logits = self._forward(alive)
            for row in alive:
                self._fed(row)
            alive = [row for row in alive if row.num_guesses]
            if not alive:
                break
            sampled = self._sampler.sample(
                logits, [row.seq for row in alive], [row.seq.draft for row in alive]
            )
            goes_on = []
            for row, token_id in zip(alive, sampled.token_ids, strict=True):
                seq = row.seq
                if token_id is None or token_id in seq.sampling.stop_token_ids:
                    continue
                draft = [*seq.draft, token_id]
                if len(usable_prefix(seq, draft)) < len(draft):
                    continue
                row.start, row.token_ids = len(seq.token_ids) + len(seq.draft), [token_id]
                seq.draft = draft
                if len(draft) < row.num_guesses:
                    goes_on.append(row)
            alive = goes_on

    def _forward(self, rows: list[_Row]) -> torch.Tensor:
        """float32 logits `[R, target's vocab_size]` behind the tokens of each row that guesses.
        Puts rows into the order of a StepBatch."""
        rows.sort(key=lambda row: len(row.token_ids) > 1)
        batch = StepBatch([], [], [], sum(len(row.token_ids) == 1 for row in rows))
        input_ids: list[int] = []
        positions: list[int] = []
        logits_rows: list[int] = []
        for row in rows:
            end = row.start + len(row.token_ids)
            self._untag(row.seq, row.start, end)
            input_ids += row.token_ids
            positions += range(row.start, end)
            batch.query_lens.append(len(row.token_ids))
            batch.seq_lens.append(end)
            batch.block_tables.append(row.seq.block_table)
            if row.num_guesses:
                logits_rows.append(len(input_ids) - 1)
        self.num_computed += len(input_ids)
        size = self._model.config.vocab_size
        if size < self._vocab_size:  # ids that only pad the target's table
            input_ids = [token if token < size else 0 for token in input_ids]
        ids, at, wanted = self._staging.put(input_ids, positions, logits_rows)
        logits = self._model.forward(ids, at, batch, wanted)
        missing = self._vocab_size - size
        if missing:  # negative: cuts off
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits

    # ------------------------------------------------------- what the blocks hold

    def _state(self, seq: Sequence) -> _DraftState:
        """As of now: of the guesses that were fed, those that came true count."""
        state = seq.proposer_state
        if state is None:
            # The last token is always fed: its logits are wanted.
            found = self._num_found(seq) * self._block_size
            num_computed = min(found, len(seq.token_ids) - 1)
            state = _DraftState(num_computed, num_computed // self._block_size)
            seq.proposer_state = state
        assert isinstance(state, _DraftState)
        for token_id in state.fed:
            if seq.token_ids[state.num_computed] != token_id:
                break
            state.num_computed += 1
        state.fed = []
        self._tag(seq, state)
        return state

    def _fed(self, row: _Row) -> None:
        """The KV of a row's tokens is there."""
        if row.start < len(row.seq.token_ids):
            row.state.num_computed = row.start + len(row.token_ids)
            self._tag(row.seq, row.state)
        else:
            row.state.fed += row.token_ids

    def _num_found(self, seq: Sequence) -> int:
        """Leading blocks of its table that hold the draft KV of its own tokens."""
        if not self._has_tags:
            return 0
        num_full = len(seq.token_ids) // self._block_size
        hashes = seq.block_hashes(num_full, self._block_size)
        for index, value in enumerate(hashes):
            if self._tags[seq.block_table[index]] != value:
                return index
        return num_full

    def _tag(self, seq: Sequence, state: _DraftState) -> None:
        num_full = state.num_computed // self._block_size
        if self._has_tags and state.num_tagged < num_full:
            hashes = seq.block_hashes(num_full, self._block_size)
            for index in range(state.num_tagged, num_full):
                self._tags[seq.block_table[index]] = hashes[index]
            state.num_tagged = num_full

    def _untag(self, seq: Sequence, start: int, end: int) -> None:
        """Positions [start, end) will be written."""
        for index in range(start // self._block_size, -(-end // self._block_size)):
            self._tags[seq.block_table[index]] = None
