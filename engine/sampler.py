"""Chooses tokens from logits, batched, with noise that depends on (seed, position) alone."""

import hashlib
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from core.types import SamplingParams, TokenLogprobs
from engine.sequence import Sequence

# How many of the most likely tokens a row with top_k or top_p looks at, one after the other,
# before it needs a full sort (which costs 10 to 50 times as much).
_WINDOWS = (256, 4096)
# Below this a temperature is a greedy choice in float32 anyway, and a division could overflow.
_MIN_TEMPERATURE = 1e-20


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
    """

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Seq[Sequence],
        drafted: Seq[Seq[int]] | None = None,
    ) -> SamplerOutput:
        """`logits`: float32 [num_rows, vocab_size], left as they are. A row with `drafted` tokens
        is sampled as if its sequence had got them already; rows of one sequence lie together,
        the one with most drafted tokens last, and each after the first drafts what the one
        before it does and one more."""
        drafted = drafted or [()] * len(sequences)
        raw = logits
        adjusted = [row for row, seq in enumerate(sequences) if _adjusts(seq.sampling)]
        if adjusted:
            logits = logits.clone()
            for row in adjusted:
                _adjust(logits[row], sequences[row], drafted[row])
        logits = _hold_to_grammars(logits, sequences, drafted)
        best, token_ids = logits.max(dim=-1)
        random = [row for row, seq in enumerate(sequences) if seq.sampling.temperature > 0]
        if random:
            params = [sequences[row].sampling for row in random]
            dices = torch.tensor(
                [
                    dice(seq.sampling.seed, len(seq.token_ids) + len(drafted[row]))
                    for row, seq in enumerate(sequences)
                    if seq.sampling.temperature > 0
                ],
                dtype=torch.float64,
                device=logits.device,
            )
            if len(random) == len(sequences):
                token_ids = _draw(logits, best, dices, params)
            else:
                token_ids[random] = _draw(logits[random], best[random], dices, params)
        chosen: list[int | None] = token_ids.tolist()
        finite: list[bool] = torch.isfinite(best).tolist()
        if not all(finite):
            chosen = [token if ok else None for token, ok in zip(chosen, finite, strict=True)]
        return SamplerOutput(chosen, _logprobs(raw, chosen, sequences))


def dice(seed: int, position: int) -> float:
    """Uniform in [0, 1), 53 bits, for the token at `position` of a sequence."""
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

    def count_new(self, seq: Sequence) -> None:
        start, num_prompt = self.num_counted, seq.num_prompt_tokens
        new = torch.tensor(seq.token_ids[start:], dtype=torch.int64, device=self.seen.device)
        self.seen[new] = True
        output = new[max(num_prompt - start, 0) :]
        self.counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        self.num_counted = len(seq.token_ids)

    def with_drafted(self, drafted: Seq[int]) -> "_Adjustment":
        """As it would be if these tokens were output."""
        new = torch.tensor(drafted, dtype=torch.int64, device=self.seen.device)
        ones = torch.ones_like(new, dtype=self.counts.dtype)
        return replace(
            self,
            seen=self.seen.index_fill(0, new, True),
            counts=self.counts.index_add(0, new, ones),
        )


def _adjusts(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or (params.min_tokens and params.stop_token_ids)
    )


def _adjust(row: torch.Tensor, seq: Sequence, drafted: Seq[int]) -> None:
    """Applies to `row` in place, in the order that SamplingParams documents: logit_bias,
    repetition penalty (Keskar et al., 2019), presence and frequency penalties, min_tokens."""
    params, state = seq.sampling, _adjustment(row, seq)
    if params.logit_bias:
        row.index_add_(0, state.bias_ids, state.bias)
    has_penalty = params.presence_penalty or params.frequency_penalty
    if has_penalty or params.repetition_penalty != 1.0:
        state.count_new(seq)
        if drafted:
            state = state.with_drafted(drafted)
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalised = torch.where(row > 0, row / penalty, row * penalty)
        row.copy_(torch.where(state.seen, penalised, row))
    if params.frequency_penalty:
        row.sub_(state.counts, alpha=params.frequency_penalty)
    if params.presence_penalty:
        row.sub_((state.counts > 0).to(row.dtype), alpha=params.presence_penalty)
    if seq.num_output_tokens + len(drafted) < params.min_tokens and not _may_only_end(seq):
        row[state.stop_ids] = -torch.inf


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


def _hold_to_grammars(
    logits: torch.Tensor, sequences: Seq[Sequence], drafted: Seq[Seq[int]]
) -> torch.Tensor:
    """The logits with -inf for what a grammar forbids; never changes its argument."""
    held: dict[int, tuple[Sequence, list[int]]] = {}  # rows by sequence
    for row, seq in enumerate(sequences):
        if seq.matcher is not None:
            held.setdefault(id(seq), (seq, []))[1].append(row)
    if not held:
        return logits
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    for seq, rows in held.values():
        assert seq.matcher is not None
        allowed = seq.matcher.allowed(drafted[rows[-1]])[-len(rows) :]
        forbidden[rows] = ~allowed.to(logits.device)
    return logits.masked_fill(forbidden, -torch.inf)


# ------------------------------------------------------------------------- drawing


def _draw(
    logits: torch.Tensor, best: torch.Tensor, dices: torch.Tensor, params: Seq[SamplingParams]
) -> torch.Tensor:
    """One token for each row, all with a temperature. `best` is each row's maximum."""
    device = logits.device
    temperature = torch.tensor(
        [max(p.temperature, _MIN_TEMPERATURE) for p in params], dtype=logits.dtype, device=device
    )
    # Relative to the best token, whose weight is exactly 1: min_p compares with it directly.
    weights = (logits - best[:, None]).div_(temperature[:, None]).exp_()
    filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if not filtered:
        return _pick(_apply_min_p(weights, params), dices)
    token_ids = torch.empty(len(params), dtype=torch.int64, device=device)
    whole = [row for row, p in enumerate(params) if not (p.top_k > 0 or p.top_p < 1)]
    if whole:
        some = [params[row] for row in whole]
        token_ids[whole] = _pick(_apply_min_p(weights[whole], some), dices[whole])
    token_ids[filtered] = _draw_filtered(
        logits[filtered], weights[filtered], dices[filtered], [params[row] for row in filtered]
    )
    return token_ids


def _draw_filtered(
    logits: torch.Tensor, weights: torch.Tensor, dices: torch.Tensor, params: Seq[SamplingParams]
) -> torch.Tensor:
    """`_draw` for rows with top_k or top_p: looks at the most likely tokens only, and sorts
    whole rows where those turn out to be too few."""
    size = logits.shape[-1]
    smallest = 2 * max(p.top_k for p in params)
    windows = [window for window in _WINDOWS if smallest <= window <= size // 8]
    total = weights.sum(dim=-1, dtype=torch.float64)
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    rows = list(range(len(params)))
    for window in [*windows, size]:
        some = [params[row] for row in rows]
        token_ids[rows], is_exact = _draw_window(
            logits[rows], weights[rows], total[rows], dices[rows], some, window
        )
        rows = [row for row, exact in zip(rows, is_exact, strict=True) if not exact]
        if not rows:
            break
    return token_ids


def _draw_window(
    logits: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,  # float64 [num_rows], sum of all weights
    dices: torch.Tensor,
    params: Seq[SamplingParams],
    window: int,
) -> tuple[torch.Tensor, list[bool]]:
    """Token ids, and for each row whether they are exact: the kept tokens end inside of the
    window, before the tie group that its edge may have cut."""
    device, size = logits.device, logits.shape[-1]
    values, ids = _most_likely(logits, window)
    top_k = torch.tensor(
        [min(p.top_k, size) if p.top_k > 0 else size for p in params], device=device
    )
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    kept = weights.gather(-1, ids)
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    # top_p is a share of what top_k left over.
    of_top_k = cumulative.gather(-1, (top_k.clamp(max=window) - 1)[:, None]).squeeze(-1)
    mass = torch.where(top_k < size, of_top_k, total)
    # A row with top_p = 1 must not lose its tail to rounding.
    limit = torch.where(top_p < 1, top_p * mass, torch.inf)
    ranks = torch.arange(window, device=device)
    is_kept = (ranks < top_k[:, None]) & (before < limit[:, None])
    is_kept[:, 0] = True
    num_kept = is_kept.sum(dim=-1)
    edge = values.gather(-1, (num_kept - 1)[:, None]).squeeze(-1)
    is_exact = torch.full_like(num_kept, window == size, dtype=torch.bool)
    is_exact |= edge > values[:, -1]
    kept = _apply_min_p(kept * is_kept, params)
    ids, order = ids.sort(dim=-1)
    picked = _pick(kept.gather(-1, order), dices)
    return ids.gather(-1, picked[:, None]).squeeze(-1), is_exact.tolist()


def _most_likely(logits: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `window` largest values of each row and their ids, best first, ties by lower id.
    `topk` is several times cheaper than a sort of the vocabulary but breaks ties as it likes:
    the order is made afterwards, and which of a tie group at the edge are in is not defined."""
    if window == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(window, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _apply_min_p(weights: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    if not any(p.min_p > 0 for p in params):
        return weights
    # At most 1, so that the best token always stays.
    floor = [min(p.min_p, 1.0) for p in params]
    min_p = torch.tensor(floor, dtype=weights.dtype, device=weights.device)
    return weights * (weights >= min_p[:, None])


def _pick(weights: torch.Tensor, dices: torch.Tensor) -> torch.Tensor:
    """Index of the first entry whose cumulative weight exceeds u times the sum: never one of
    weight 0, even if rounding puts u times the sum at the sum itself."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    picked = torch.searchsorted(cumulative, dices[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(picked, last).clamp(max=weights.shape[-1] - 1).squeeze(-1)


# ------------------------------------------------------------------------ logprobs


def score(logits: torch.Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Logprobs of one given token for each row of raw logits, with the `num_top` best."""
    return [_entry(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)]


def _logprobs(
    raw: torch.Tensor, chosen: Seq[int | None], sequences: Seq[Sequence]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    for row, (token_id, seq) in enumerate(zip(chosen, sequences, strict=True)):
        num_top = seq.sampling.logprobs
        if num_top is None or token_id is None:
            continue
        result[row] = _entry(raw[row], token_id, num_top)
    return result


def _entry(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    values = logits.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        top = _top_of(values, min(num_top, values.numel()))
    return TokenLogprobs(logprob=values[token_id].item(), top=top)


def _top_of(values: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` best entries of one row, ties by lower id."""
    threshold = values.topk(count).values[-1]
    ids = (values >= threshold).nonzero().squeeze(-1)  # ascending
    best, order = values[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:count]].tolist(), best[:count].tolist(), strict=True))
