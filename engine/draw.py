"""One token for each row of logits: the inverse of the cumulative distribution over the kept
tokens in vocabulary order, at a number that the caller has drawn.

On a GPU nothing here waits for it: what is known on the host is decided on the host, and what is
known there alone never decides what is done next.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from core.types import SamplingParams
from engine.staging import Staging

# How many of the most likely tokens a row with top_k or top_p looks at, one after the other,
# before it needs a full sort (which costs a CPU 10 to 50 times as much).
_WINDOWS = (256, 4096)
# Below this a temperature is a greedy choice in float32 anyway, and a division could overflow.
_MIN_TEMPERATURE = 1e-20


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row is drawn; all have a temperature. Tensors `[rows]` on the logits' device."""

    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int64, the vocabulary's size for none
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float32, at most 1, so that the best token always stays
    dices: torch.Tensor  # float64, uniform in [0, 1)
    filtered: torch.Tensor  # int64, rows with top_k or top_p
    whole: torch.Tensor  # int64, all others
    rows: torch.Tensor  # int64, where these rows are among those of the caller
    has_min_p: bool
    largest_top_k: int  # of those that have one

    def of(self, rows: torch.Tensor) -> "Draws":
        """Of these rows alone."""
        none = rows[:0]
        return Draws(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows],
            self.dices[rows], none, none, self.rows[rows], self.has_min_p, self.largest_top_k,
        )  # fmt: skip


def make_draws(
    params: Seq[SamplingParams],
    dices: Seq[float],
    rows: Seq[int],
    vocab_size: int,
    staging: Staging,  # of float64
) -> Draws:
    is_filtered = [p.top_k > 0 or p.top_p < 1 for p in params]
    temperature, top_k, top_p, min_p, on_device, filtered, whole, where = staging.put(
        [max(p.temperature, _MIN_TEMPERATURE) for p in params],
        [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params],
        [p.top_p for p in params],
        [min(p.min_p, 1.0) for p in params],
        dices,
        [row for row, value in enumerate(is_filtered) if value],
        [row for row, value in enumerate(is_filtered) if not value],
        rows,
    )
    return Draws(
        temperature.float(), top_k.long(), top_p, min_p.float(), on_device, filtered.long(),
        whole.long(), where.long(), any(p.min_p > 0 for p in params),
        max(p.top_k for p in params),
    )  # fmt: skip


def draw(logits: torch.Tensor, best: torch.Tensor, draws: Draws) -> torch.Tensor:
    """int64 [rows]. `best` is each row's maximum."""
    # Relative to the best token, whose weight is exactly 1: min_p compares with it directly.
    weights = (logits - best[:, None]).div_(draws.temperature[:, None]).exp_()
    if not len(draws.filtered):
        return _pick(_apply_min_p(weights, draws), draws.dices)
    if not len(draws.whole):
        return _draw_filtered(logits, weights, draws)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    whole, filtered = draws.whole, draws.filtered
    some = draws.of(whole)
    token_ids[whole] = _pick(_apply_min_p(weights[whole], some), some.dices)
    token_ids[filtered] = _draw_filtered(logits[filtered], weights[filtered], draws.of(filtered))
    return token_ids


def _draw_filtered(logits: torch.Tensor, weights: torch.Tensor, draws: Draws) -> torch.Tensor:
    """`draw` for rows with top_k or top_p. A CPU looks at the most likely tokens only, and sorts
    whole rows where those turn out to be too few; a GPU sorts them all at once."""
    size = logits.shape[-1]
    total = weights.sum(dim=-1, dtype=torch.float64)
    if not logits.is_cuda:
        smallest = 2 * draws.largest_top_k
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        rows = torch.arange(len(logits))
        for window in (w for w in _WINDOWS if smallest <= w <= size // 8):
            token_ids[rows], is_exact = _draw_window(
                logits[rows], weights[rows], total[rows], draws.of(rows), window
            )
            rows = rows[~is_exact]
            if not len(rows):
                return token_ids
        token_ids[rows], _ = _draw_window(
            logits[rows], weights[rows], total[rows], draws.of(rows), size
        )
        return token_ids
    return _draw_window(logits, weights, total, draws, size)[0]


def _draw_window(
    logits: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,  # float64 [num_rows], sum of all weights
    draws: Draws,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and for each row whether they are exact: the kept tokens end inside of the
    window, before the tie group that its edge may have cut."""
    size = logits.shape[-1]
    values, ids = most_likely(logits, window)
    kept = weights.gather(-1, ids)
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    # top_p is a share of what top_k left over.
    of_top_k = cumulative.gather(-1, (draws.top_k.clamp(max=window) - 1)[:, None]).squeeze(-1)
    mass = torch.where(draws.top_k < size, of_top_k, total)
    # A row with top_p = 1 must not lose its tail to rounding.
    limit = torch.where(draws.top_p < 1, draws.top_p * mass, torch.inf)
    ranks = torch.arange(window, device=logits.device)
    is_kept = (ranks < draws.top_k[:, None]) & (before < limit[:, None])
    is_kept[:, 0] = True
    num_kept = is_kept.sum(dim=-1)
    edge = values.gather(-1, (num_kept - 1)[:, None]).squeeze(-1)
    is_exact = torch.full_like(num_kept, window == size, dtype=torch.bool)
    is_exact |= edge > values[:, -1]
    kept = _apply_min_p(kept * is_kept, draws)
    ids, order = ids.sort(dim=-1)
    picked = _pick(kept.gather(-1, order), draws.dices)
    return ids.gather(-1, picked[:, None]).squeeze(-1), is_exact


def most_likely(logits: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `window` largest values of each row and their ids, best first, ties by lower id.
    `topk` is several times cheaper than a sort of the vocabulary but breaks ties as it likes:
    the order is made afterwards, and which of a tie group at the edge are in is not defined."""
    if window == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(window, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _apply_min_p(weights: torch.Tensor, draws: Draws) -> torch.Tensor:
    if not draws.has_min_p:
        return weights
    return weights * (weights >= draws.min_p[:, None])


def _pick(weights: torch.Tensor, dices: torch.Tensor) -> torch.Tensor:
    """Index of the first entry whose cumulative weight exceeds u times the sum: never one of
    weight 0, even if rounding puts u times the sum at the sum itself."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    picked = torch.searchsorted(cumulative, dices[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(picked, last).clamp(max=weights.shape[-1] - 1).squeeze(-1)
