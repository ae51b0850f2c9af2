"""Chooses tokens from logits, batched, with noise that depends on (seed, position) alone."""

import hashlib
import math
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from core.types import SamplingParams, TokenLogprobs
from engine.draw import draw, make_draws
from engine.logprobs import logprobs_of
from engine.sequence import Sequence
from engine.staging import Staging
from engine.types import Maxima


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry for each row. A token of None: the row's logits have no finite maximum, so that
    no answer would be right."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Keeps nothing between steps but what it stores in `Sequence.sampler_state`.

    - Temperature 0 is the argmax of the adjusted logits, whatever the filters say; ties go to
      the lower id everywhere.
    - Otherwise one uniform number u per row, `dice(seed, position)`, and the inverse of the
      cumulative distribution over the kept tokens in vocabulary order. The same logits give the
      same token in any batch, on any worker and after a preemption.
    - Logprobs are those of the raw logits, before any adjustment.
    - What all rows need goes to a GPU in asynchronous copies, one for each kind, and the ids come
      back in one. Logprobs, where somebody wants them, come back in a second one.
    """

    def __init__(self) -> None:
        self._use(torch.device("cpu"))

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Seq[Sequence],
        drafted: Seq[Seq[int]] | None = None,
        maxima: Maxima | None = None,
    ) -> SamplerOutput:
        """`logits`: float32 [num_rows, vocab_size], left as they are. A row with `drafted` tokens
        is sampled as if its sequence had got them already; rows of one sequence lie together,
        the one with most drafted tokens last, and each after the first drafts what the one
        before it does and one more. `maxima`: of `logits`, and maybe of rows behind them."""
        if logits.device != self._device:
            self._use(logits.device)
        drafted = drafted or [()] * len(sequences)
        raw = logits
        adjusted = [row for row, seq in enumerate(sequences) if _adjusts(seq.sampling)]
        if adjusted:
            logits = logits.clone()
            self._adjust(logits, adjusted, sequences, drafted)
        logits = self._hold_to_grammars(logits, sequences, drafted)
        if maxima is None or logits is not raw:
            best, token_ids = _maxima(logits)
        else:
            best, token_ids = (found[: len(sequences)] for found in maxima)
        random = [row for row, seq in enumerate(sequences) if seq.sampling.temperature > 0]
        if random:
            params = [sequences[row].sampling for row in random]
            positions = [len(sequences[row].token_ids) + len(drafted[row]) for row in random]
            dices = [dice(p.seed, position) for p, position in zip(params, positions, strict=True)]
            draws = make_draws(params, dices, random, logits.shape[-1], self._numbers)
            if len(random) == len(sequences):
                token_ids = draw(logits, best, draws)
            else:
                rows = draws.rows
                token_ids[rows] = draw(logits[rows], best[rows], draws)
        if logits.is_cuda:
            found: list[int] = torch.where(torch.isfinite(best), token_ids, -1).tolist()
            chosen = [None if token_id < 0 else token_id for token_id in found]
        else:  # two operations less
            pairs = zip(token_ids.tolist(), best.tolist(), strict=True)
            chosen = [token_id if math.isfinite(value) else None for token_id, value in pairs]
        return SamplerOutput(chosen, self._logprobs(raw, chosen, sequences))

    def _use(self, device: torch.device) -> None:
        self._device = device
        self._numbers = Staging(device, torch.float64)
        self._tokens = Staging(device, torch.int64)

    def _adjust(
        self,
        logits: torch.Tensor,
        rows: Seq[int],
        sequences: Seq[Sequence],
        drafted: Seq[Seq[int]],
    ) -> None:
        """Applies in place what `rows` ask for."""
        adjustments: list[_Adjustment] = []
        parts: list[Seq[int]] = []
        for row in rows:
            seq = sequences[row]
            adjustment = _adjustment(logits[row], seq)
            if _counts(seq.sampling):
                is_first = not adjustments or adjustments[-1] is not adjustment
                parts += adjustment.uncounted(seq) if is_first else ((), ())
                parts.append(drafted[row])
            adjustments.append(adjustment)
        staged = iter(self._tokens.put(*parts))
        for row, adjustment in zip(rows, adjustments, strict=True):
            seq = sequences[row]
            if _counts(seq.sampling):
                adjustment.count(next(staged), next(staged))
                adjustment = adjustment.with_drafted(next(staged))
            _adjust(logits[row], seq, adjustment, len(drafted[row]))

    def _hold_to_grammars(
        self, logits: torch.Tensor, sequences: Seq[Sequence], drafted: Seq[Seq[int]]
    ) -> torch.Tensor:
        """The logits with -inf for what a grammar forbids; never changes its argument."""
        held: dict[int, tuple[Sequence, list[int]]] = {}  # rows by sequence
        for row, seq in enumerate(sequences):
            if seq.matcher is not None:
                held.setdefault(id(seq), (seq, []))[1].append(row)
        if not held:
            return logits
        masks, all_rows = [], []
        for seq, rows in held.values():
            assert seq.matcher is not None
            masks.append(seq.matcher.allowed(drafted[rows[-1]])[-len(rows) :])
            all_rows += rows
        allowed = torch.cat(masks)
        if logits.is_cuda:
            allowed = allowed.pin_memory().to(logits.device, non_blocking=True)
        (index,) = self._tokens.put(all_rows)
        return logits.index_copy(0, index, logits[index].masked_fill(~allowed, -torch.inf))

    def _logprobs(
        self, raw: torch.Tensor, chosen: Seq[int | None], sequences: Seq[Sequence]
    ) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(chosen)
        rows, token_ids, num_tops = [], [], []
        for row, (token_id, seq) in enumerate(zip(chosen, sequences, strict=True)):
            if seq.sampling.logprobs is not None and token_id is not None:
                rows.append(row)
                token_ids.append(token_id)
                num_tops.append(seq.sampling.logprobs)
        if rows:
            (index,) = self._tokens.put(rows)
            found = logprobs_of(raw[index], token_ids, num_tops)
            for row, entry in zip(rows, found, strict=True):
                result[row] = entry
        return result


def _maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest of each row and the first place that has it; NaN counts as greatest."""
    if logits.is_cuda:
        return logits.max(dim=-1)
    numbers = logits.numpy()  # whose search takes a sixth of the time
    places = numbers.argmax(axis=-1)
    best = numbers[np.arange(len(places)), places]
    return torch.from_numpy(best), torch.from_numpy(places)


def dice(seed: int, position: int) -> float:
    """Uniform in [0, 1), 53 bits, for the token at `position` of a sequence. Made on the host, so
    that it is the same for every device."""
    key = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, position)
    digest = hashlib.blake2b(key, digest_size=8, person=b"pdserve-dice").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


# ----------------------------------------------------------------------- adjusting


@dataclass(slots=True)
class _Adjustment:
    """What the adjustments of one sequence need, kept up to date as its tokens grow.

    Prompt and output count differently: repetition sees both (`seen`), presence and frequency
    the output alone (`counts`).
    """

    bias_ids: torch.Tensor
    bias: torch.Tensor
    stop_ids: torch.Tensor
    seen: torch.Tensor  # bool [vocab_size]
    counts: torch.Tensor  # float32 [vocab_size]
    num_counted: int = 0

    def uncounted(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and of the output that are to be counted."""
        start, num_prompt = self.num_counted, seq.num_prompt_tokens
        return seq.token_ids[start:num_prompt], seq.token_ids[max(start, num_prompt) :]

    def count(self, prompt: torch.Tensor, output: torch.Tensor) -> None:
        self.num_counted += len(prompt) + len(output)
        self.seen.index_fill_(0, prompt, True).index_fill_(0, output, True)
        self.counts.index_add_(0, output, torch.ones_like(output, dtype=self.counts.dtype))

    def with_drafted(self, drafted: torch.Tensor) -> "_Adjustment":
        """As it would be if these tokens were output."""
        if not len(drafted):
            return self
        ones = torch.ones_like(drafted, dtype=self.counts.dtype)
        return replace(
            self,
            seen=self.seen.index_fill(0, drafted, True),
            counts=self.counts.index_add(0, drafted, ones),
        )


def _adjusts(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias or _counts(params) or (params.min_tokens and params.stop_token_ids)
    )


def _counts(params: SamplingParams) -> bool:
    has_penalty = params.presence_penalty or params.frequency_penalty
    return bool(has_penalty or params.repetition_penalty != 1.0)


def _adjust(row: torch.Tensor, seq: Sequence, state: _Adjustment, num_drafted: int) -> None:
    """Applies to `row` in place, in the order that SamplingParams documents: logit_bias,
    repetition penalty (Keskar et al., 2019), presence and frequency penalties, min_tokens."""
    params = seq.sampling
    if params.logit_bias:
        row.index_add_(0, state.bias_ids, state.bias)
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalised = torch.where(row > 0, row / penalty, row * penalty)
        row.copy_(torch.where(state.seen, penalised, row))
    if params.frequency_penalty:
        row.sub_(state.counts, alpha=params.frequency_penalty)
    if params.presence_penalty:
        row.sub_((state.counts > 0).to(row.dtype), alpha=params.presence_penalty)
    if seq.num_output_tokens + num_drafted < params.min_tokens and not _may_only_end(seq):
        row.index_fill_(0, state.stop_ids, -torch.inf)


def _may_only_end(seq: Sequence) -> bool:
    """A grammar without any continuation wins over min_tokens."""
    return seq.matcher is not None and seq.matcher.is_finished


def _adjustment(row: torch.Tensor, seq: Sequence) -> _Adjustment:
    if seq.sampler_state is None:
        params, size, device = seq.sampling, row.numel(), row.device
        stop_ids = [token for token in params.stop_token_ids if token < size]
        seq.sampler_state = _Adjustment(
            bias_ids=torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device),
            bias=torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=device),
            stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=device),
            seen=torch.zeros(size, dtype=torch.bool, device=device),
            counts=torch.zeros(size, dtype=row.dtype, device=device),
        )
    return seq.sampler_state
