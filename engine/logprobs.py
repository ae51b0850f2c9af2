"""Logprobs of tokens, of raw logits."""

from collections.abc import Sequence as Seq

import torch

from core.types import TokenLogprobs


def logprobs_of(
    logits: torch.Tensor,  # float32 [rows, vocab_size]
    token_ids: Seq[int],  # of each row
    num_tops: Seq[int],  # how many of the best each row wants beside
) -> list[TokenLogprobs]:
    """Ties among the best go to the lower id. A GPU is waited for once, for all rows."""
    if logits.is_cuda:
        return _batched(logits, token_ids, num_tops)
    rows = zip(logits, token_ids, num_tops, strict=True)
    return [_entry(row, token_id, num_top) for row, token_id, num_top in rows]


def _batched(logits: torch.Tensor, token_ids: Seq[int], num_tops: Seq[int]) -> list[TokenLogprobs]:
    values = logits.log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, dtype=torch.int64)
    if logits.is_cuda:
        chosen = chosen.pin_memory().to(logits.device, non_blocking=True)
    parts = [values.gather(-1, chosen[:, None]).double()]
    largest = min(max(num_tops, default=0), values.shape[-1])
    if largest:  # a topk would break ties as it likes
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        parts += [best[:, :largest].double(), ids[:, :largest].double()]
    rows = torch.cat(parts, dim=-1).tolist()  # float64 holds every float32 and every id
    return [
        TokenLogprobs(
            logprob=row[0],
            top=tuple(
                (int(token_id), logprob)
                for logprob, token_id in zip(
                    row[1 : 1 + num_top], row[1 + largest : 1 + largest + num_top], strict=True
                )
            ),
        )
        for row, num_top in zip(rows, (min(n, largest) for n in num_tops), strict=True)
    ]


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
