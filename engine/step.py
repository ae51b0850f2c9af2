"""The inputs of one step: from what the scheduler planned to what the model is given."""

from dataclasses import dataclass, field

from core.types import Pooling
from engine.attention.base import StepBatch
from engine.scheduler import StepPlan
from engine.sequence import Sequence


@dataclass(slots=True)
class Score:
    """Prompt tokens whose logprobs are wanted: each is predicted by the row before its own."""

    seq: Sequence
    token_ids: list[int]


@dataclass(slots=True)
class Pool:
    """How many of a sequence's rows in this step count for its embedding."""

    seq: Sequence
    num_rows: int


@dataclass(slots=True)
class StepInputs:
    """Tokens of all sequences one after the other, and the rows whose logits are needed: first
    those to sample from, then those that score the prompt."""

    batch: StepBatch
    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    # Of each row to sample from: its sequence, and the drafted tokens that come before it.
    sampled: list[Sequence] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)  # in the order of their rows
    # Rows whose final hidden states are needed, and whose they are.
    hidden_rows: list[int] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)


def prepare(plan: StepPlan) -> StepInputs:
    """Touches no tensor and changes nothing."""
    batch = StepBatch([], [], [], plan.num_decodes)
    inputs = StepInputs(batch)
    score_rows: list[int] = []
    for seq, num_tokens in plan.steps:
        start = seq.num_computed_tokens
        end = start + num_tokens
        first_row = len(inputs.input_ids) - start  # the row of position p is first_row + p
        inputs.input_ids += seq.token_ids[start:end] + seq.draft
        inputs.positions += range(start, end)
        batch.query_lens.append(num_tokens)
        batch.seq_lens.append(end)
        batch.block_tables.append(seq.block_table)
        last = len(seq.token_ids) - 1
        if end > last and seq.sampling.max_tokens:
            for count in range(end - last):
                inputs.logits_rows.append(first_row + last + count)
                inputs.sampled.append(seq)
                inputs.drafted.append(seq.draft[:count])
        if seq.wants_prompt_logprobs:
            # After a preemption some positions are computed again that were scored already.
            scored = range(max(start, seq.num_prompt_logprobs), min(end, seq.num_prompt_tokens - 1))
            score_rows += [first_row + position for position in scored]
            targets = [seq.token_ids[position + 1] for position in scored]
            inputs.scores.append(Score(seq, targets))
        if seq.sampling.pooling is not None:
            first = last if seq.sampling.pooling is Pooling.LAST else 0
            counted = range(max(start, first, seq.num_pooled), end)
            inputs.hidden_rows += [first_row + position for position in counted]
            inputs.pools.append(Pool(seq, len(counted)))
    inputs.logits_rows += score_rows
    return inputs
