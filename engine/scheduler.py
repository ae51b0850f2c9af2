"""Decides what runs in a step, and which sequence owns which blocks. Never touches a tensor.

A step is: one token for every sequence that decodes, guesses of what follows it, then chunks of
prompts in the order of arrival, then admissions, all within `max_num_batched_tokens`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from core.config import EngineConfig
from core.errors import EngineError
from engine.block_pool import BlockPool, Owner
from engine.sequence import Sequence, SequenceState

# Gives a sequence blocks for so many guesses behind its last token, and says for how many it has.
MakeRoom = Callable[[Sequence, int], int]
# Sets the `draft` of each of these sequences, which all decode, and returns how many tokens of
# the given budget that takes. It makes room before it guesses, or cuts the guess after.
Propose = Callable[[list[Sequence], int, MakeRoom], int]
# Tokens of a step whose logits are all wanted, about: [256, 128k] float32 are 128 MB.
MAX_SCORED_TOKENS = 256

_OWNERS = {
    SequenceState.RUNNING: Owner.RUNNING,
    SequenceState.HELD: Owner.HELD,
    SequenceState.AWAITING: Owner.AWAITING,
}


@dataclass(slots=True)
class StepPlan:
    """What one step computes, and what changed hands for it. Sequences that decode one token come
    first, then those with a draft (`Sequence.draft`), then prompts."""

    steps: list[tuple[Sequence, int]] = field(default_factory=list)  # with num_scheduled_tokens
    num_decodes: int = 0  # without a draft
    num_scored: int = 0  # tokens of prompts whose logprobs are wanted
    admitted: list[Sequence] = field(default_factory=list)  # for the first time
    has_preempted: bool = False
    has_readmitted: bool = False

    @property
    def made_progress(self) -> bool:
        """False: the next step will be just as empty unless something comes from outside."""
        return bool(self.steps or self.admitted or self.has_preempted or self.has_readmitted)


class Scheduler:
    """Owns the queues and the block tables.

    - A sequence gets the blocks of all its tokens at admission, or none. A prefill that was
      admitted can therefore always finish; only decoding asks for more, a block at a time.
    - Admission is in the order of arrival over both queues, so that nobody starves. It leaves
      one free block for each sequence that may grow; an empty engine admits anything.
    - When a block is missing the newest decoding or prefilling sequence is preempted: it gives
      all blocks back and waits at the front to compute its tokens again. HELD, AWAITING and
      prefill_only sequences are never preempted: a peer knows their blocks. The oldest of the
      others always runs, so work always ends.
    - While a preempted sequence waits, nothing else is admitted. It does not fit in the step
      that preempted it: one of its blocks is gone by then.
    - Nothing is written into a block that somebody else may read: a hit covers full blocks
      only, and leaves at least one token to compute.
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, propose: Propose | None = None
    ) -> None:
        self.pool = pool
        self._propose = propose
        self.waiting: deque[Sequence] = deque()
        self.waiting_remote: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.awaiting: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self._block_size = config.block_size
        self.set_limits(config)

    def set_limits(self, config: EngineConfig) -> None:
        """How much a step may do. While nothing is here."""
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens

    # ------------------------------------------------------------------ a step

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        budget = self._schedule_decodes(plan, self._max_num_batched_tokens)
        budget = self._schedule_prefills(plan, budget)
        self._admit(plan, budget)
        return plan

    def _schedule_decodes(self, plan: StepPlan, budget: int) -> int:
        # A victim is never older than the sequence that asks, so it has no turn in this plan yet.
        index = 0
        while index < len(self.running) and budget:
            seq = self.running[index]
            if not seq.is_prefilling:
                if not self._grow(seq, plan):
                    continue  # it was preempted itself: the next one has its index
                plan.steps.append((seq, 1))
                budget -= 1
            index += 1
        if self._propose is not None and plan.steps:
            budget = self._add_drafts(plan, budget, self._propose)
        plan.num_decodes = sum(1 for _, num_tokens in plan.steps if num_tokens == 1)
        return budget

    def _add_drafts(self, plan: StepPlan, budget: int, propose: Propose) -> int:
        """Lets sequences that decode guess as far as budget and blocks allow."""
        budget -= propose([seq for seq, _ in plan.steps], budget, self._make_room)
        plan.steps = [(seq, 1 + len(seq.draft)) for seq, _ in plan.steps]
        plan.steps.sort(key=lambda step: step[1] > 1)  # stable
        return budget

    def _make_room(self, seq: Sequence, num_guesses: int) -> int:
        """Nobody is preempted, and no reserve used, for a guess."""
        num_slots = len(seq.block_table) * self._block_size - seq.num_computed_tokens - 1
        missing = -(-(num_guesses - num_slots) // self._block_size)
        if missing > 0:
            if self.pool.num_free - missing < self._num_reserved():
                return num_slots
            seq.block_table += self.pool.allocate(missing, Owner.RUNNING)
        return num_guesses

    def _schedule_prefills(self, plan: StepPlan, budget: int) -> int:
        for seq in self.running:
            if not budget:
                break
            if seq.is_prefilling:
                budget = self._schedule_chunk(seq, plan, budget)
        return budget

    def _schedule_chunk(self, seq: Sequence, plan: StepPlan, budget: int) -> int:
        num_tokens = min(budget, seq.num_uncomputed_tokens)
        if seq.wants_prompt_logprobs:
            num_tokens = min(num_tokens, max(1, MAX_SCORED_TOKENS - plan.num_scored))
            plan.num_scored += num_tokens
        plan.steps.append((seq, num_tokens))
        return budget - num_tokens

    def _grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Makes room for the KV of one more token; False if `seq` had to go itself."""
        if seq.num_computed_tokens < len(seq.block_table) * self._block_size:
            return True
        while not self.pool.num_free:
            victim = next(s for s in reversed(self.running) if not s.prefill_only)
            self._preempt(victim)
            plan.has_preempted = True
            if victim is seq:
                return False
        seq.block_table += self.pool.allocate(1, Owner.RUNNING)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free(seq)
        seq.state = SequenceState.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    # --------------------------------------------------------------- admission

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while len(self.running) + len(self.awaiting) < self._max_num_seqs:
            seq = self._next_in_line(budget)
            if seq is None or not self._take_blocks(seq):
                return
            if seq.was_admitted:
                plan.has_readmitted = True
            else:
                seq.was_admitted = True
                self.num_hit_tokens += seq.num_cached_tokens
                plan.admitted.append(seq)
            if seq.wants_remote_kv:
                self.waiting_remote.popleft()
                self.awaiting[seq.request_id] = seq
            else:
                self.waiting.popleft()
                self.running.append(seq)
                budget = self._schedule_chunk(seq, plan, budget)

    def _next_in_line(self, budget: int) -> Sequence | None:
        local = self.waiting[0] if self.waiting else None
        remote = self.waiting_remote[0] if self.waiting_remote else None
        if local is not None and local.was_admitted:
            return local if budget else None
        if local is None or not budget:  # a reservation costs no tokens of this step
            return remote
        return remote if remote is not None and remote.arrival < local.arrival else local

    def _take_blocks(self, seq: Sequence) -> bool:
        """Gives a sequence the blocks of all its tokens, cached ones first; False, and nothing
        has changed, if they are not to be had.

            | hit: shared, read only |  allocated: written here or by a peer  |
            0                num_cached_tokens                       num_prefill_tokens
        """
        pool, block_size = self.pool, self._block_size
        num_tokens = len(seq.token_ids)
        # The last token is computed here, unless a peer sends what is missing.
        num_usable = num_tokens if seq.wants_remote_kv else num_tokens - 1
        hits: list[int] = []
        if pool.enable_prefix_caching and not seq.needs_every_row:
            hits = pool.find(seq.block_hashes(num_usable // block_size, block_size))
        num_new = -(-num_tokens // block_size) - len(hits)
        if num_new + self._num_reserved() > pool.num_free_without(hits):
            return False
        seq.state = SequenceState.AWAITING if seq.wants_remote_kv else SequenceState.RUNNING
        owner = _OWNERS[seq.state]
        pool.share(hits, owner)  # before allocate, which could evict them
        seq.block_table = hits + pool.allocate(num_new, owner)
        seq.num_prefill_tokens = num_tokens
        seq.num_registered_blocks = len(hits)
        seq.num_cached_tokens = seq.num_computed_tokens = len(hits) * block_size
        return True

    def _num_reserved(self) -> int:
        """Free blocks that an admission leaves for those who may grow."""
        return len(self.awaiting) + sum(not seq.prefill_only for seq in self.running)

    # ------------------------------------------------------- changes of state

    def add(self, seq: Sequence) -> None:
        (self.waiting_remote if seq.wants_remote_kv else self.waiting).append(seq)

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of `num_tokens` more tokens is final: blocks that are full now can be found."""
        seq.num_computed_tokens += num_tokens
        num_full = seq.num_computed_tokens // self._block_size
        if not self.pool.enable_prefix_caching or num_full <= seq.num_registered_blocks:
            return
        hashes = seq.block_hashes(num_full, self._block_size)
        for index in range(seq.num_registered_blocks, num_full):
            self.pool.register(seq.block_table[index], hashes[index])
        seq.num_registered_blocks = num_full

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out of whatever queue it is in and frees its blocks."""
        if seq.state is SequenceState.WAITING:
            (self.waiting_remote if seq.wants_remote_kv else self.waiting).remove(seq)
        elif seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
        elif seq.state is SequenceState.HELD:
            del self.held[seq.request_id]
        elif seq.state is SequenceState.AWAITING:
            del self.awaiting[seq.request_id]
        self._free(seq)
        seq.state = SequenceState.FINISHED

    def hold(self, seq: Sequence) -> None:
        """RUNNING -> HELD: nothing is computed any more, the blocks stay."""
        self.running.remove(seq)
        self.held[seq.request_id] = seq
        self.pool.move(seq.block_table, Owner.RUNNING, Owner.HELD)
        seq.state = SequenceState.HELD

    def start_decode(self, seq: Sequence, first_whole_block: int = 0) -> None:
        """AWAITING -> RUNNING: a peer's KV of all tokens is in the blocks. Those before
        `first_whole_block` that are no hit miss layers that this sequence does not look at: the
        prefix cache never gets them, and a preempted sequence computes them again."""
        del self.awaiting[seq.request_id]
        self.running.append(seq)
        self.pool.move(seq.block_table, Owner.AWAITING, Owner.RUNNING)
        seq.state = SequenceState.RUNNING
        seq.wants_remote_kv = False
        seq.num_registered_blocks = max(seq.num_registered_blocks, first_whole_block)
        self.advance(seq, seq.num_uncomputed_tokens)

    def _free(self, seq: Sequence) -> None:
        if seq.block_table:
            self.pool.free(seq.block_table, _OWNERS[seq.state])
        seq.block_table = []
        seq.num_computed_tokens = seq.num_prefill_tokens = 0
        seq.num_cached_tokens = seq.num_registered_blocks = 0
        seq.proposer_state = None  # it may speak of the blocks

    # ---------------------------------------------------------------- gauges

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.waiting_remote)

    @property
    def num_waiting_prefill_tokens(self) -> int:
        """Tokens of prompts, queued or admitted, that are to be computed here."""
        return sum(len(seq.token_ids) for seq in self.waiting) + sum(
            seq.num_uncomputed_tokens for seq in self.running if seq.is_prefilling
        )

    def check(self) -> None:
        """Raises EngineError unless queues, states, tables and the pool agree."""
        expected = [
            (SequenceState.WAITING, (*self.waiting, *self.waiting_remote)),
            (SequenceState.RUNNING, self.running),
            (SequenceState.HELD, self.held.values()),
            (SequenceState.AWAITING, self.awaiting.values()),
        ]
        for state, queue in expected:
            for seq in queue:
                self._check_sequence(seq, state)
        self.pool.check(
            {
                _OWNERS[state]: [seq.block_table for seq in queue]
                for state, queue in expected
                if state in _OWNERS
            }
        )

    def _check_sequence(self, seq: Sequence, state: SequenceState) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise EngineError(f"scheduler: {seq.request_id} in {state.name}: {message}")

        require(seq.state is state, f"its state is {seq.state.name}")
        if state is SequenceState.WAITING:
            require(not seq.block_table and not seq.num_computed_tokens, "it owns blocks")
            return
        table, computed = seq.block_table, seq.num_computed_tokens
        require(len(table) == len(set(table)), "a block is twice in its table")
        require(computed <= len(table) * self._block_size, "computed tokens lie past its blocks")
        require(computed <= len(seq.token_ids), "more tokens are computed than it has")
        for block_id in table[computed // self._block_size :]:
            require(
                self.pool.is_writable(block_id),
                f"block {block_id} is to be written and can be read by others",
            )
