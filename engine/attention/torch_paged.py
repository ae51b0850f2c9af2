"""Paged attention in plain torch operations: the CPU's backend and the reference for others.

In the cache the head comes before the slot, so the keys of one (block, layer, head) are one piece
of block_size x head_dim numbers. Gathering such pieces by a flat index gives
`[2, sequences, heads, tokens, head_dim]` in one copy, and the index is the same for every layer,
shifted by where the layer starts.

Rows of a quantised cache are encoded when written and decoded when gathered (`kv_format`); what a
prompt chunk has at hand is rounded alike, so that a prefix hit and a miss give the same answer.

Query heads that share a KV head are folded into query rows, so that KV is never expanded.

Latent attention is one KV head whose values are the first numbers of its keys, stored once. Its
products take whole rows as values, and the rest of what comes out is dropped: a part of each row
would be copied first, which costs more (measured: decoding is 2 times faster this way).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine import native
from engine.attention.base import AttentionBackend, AttentionLayer, StepBatch
from engine.attention.kv_format import KVFormat, LatentFormat

# Rows of queries that a prefill attends with at once. Keys after the last row are left out, so
# smaller saves arithmetic, larger saves calls; 64 to 256 measured within 15 percent.
_QUERY_ROWS = 128
# Up to so many keys in a decode batch the fused operator beats two batched matrix products.
_FUSED_DECODE_KEYS = 512


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decoding sequences of similar length, padded to the longest."""

    rows: torch.Tensor | None  # their rows of the batch; None: all of them, in order
    size: int
    num_keys: int  # of the longest, in whole blocks
    pieces: torch.Tensor  # flat index of [2, size, num_kv_heads, blocks] pieces of layer 0
    mask: torch.Tensor | None  # [size, 1, 1, num_keys], added to scores; None: nothing is padded
    folded_mask: torch.Tensor | None  # the same for every KV head: [size * num_kv_heads, 1, keys]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence's prompt chunk: rows [start, end) of the batch, after `prefix` cached tokens."""

    start: int
    end: int
    prefix: int
    pieces: torch.Tensor | None  # as in _DecodeGroup; None: no prefix, keys are at hand
    table: torch.Tensor  # int64 [blocks]


class TorchPagedAttention(AttentionBackend):
    """Owns the step's plan and a buffer to gather into. The cache is the engine's, and must hold
    finite numbers also where nothing was written yet: padded keys are masked after being read."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        num_heads: int,
        kv_format: KVFormat | LatentFormat | None = None,
    ) -> None:
        _, num_layers, num_parts, num_kv_heads, block_size, row = kv_cache.shape
        self._format = kv_format or KVFormat("auto", kv_cache.dtype)
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._block_size = block_size
        self._head_dim = self._value_dim = self._format.head_dim(row)
        self._has_values = True
        if isinstance(self._format, LatentFormat):
            self._value_dim = self._format.latent_dim
            self._has_values = False  # they are a part of the keys
        self._row = row
        self._pieces_per_layer = num_parts * num_kv_heads
        self._pieces_per_block = num_layers * self._pieces_per_layer
        self._slots = kv_cache.view(-1, row)
        self._pieces = kv_cache.view(-1, block_size * row)
        # Gathered into again for every layer: fresh megabytes would cost a page fault each 4 KiB.
        self._scratch = self._pieces.new_empty(0, block_size * row)
        self._cache = kv_cache
        # A cache that is not what the model computes in has queries of another type.
        is_plain = self._format.compute_dtype == kv_cache.dtype
        self._has_native = is_plain and self._has_values and native.can_attend(kv_cache)
        if self._has_native:
            self._caches = [native.LayerCache(kv_cache, i) for i in range(num_layers)]
        self._device = kv_cache.device
        self._dtype = self._format.compute_dtype
        heads = torch.arange(self._pieces_per_layer, device=self._device)
        self._piece_of_head = heads.view(num_parts, num_kv_heads)
        rows = torch.full((_QUERY_ROWS, _QUERY_ROWS), -math.inf, device=self._device)
        self._future = rows.triu(1).to(self._dtype)

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch
        self._native_plan: tuple[torch.Tensor, torch.Tensor] | None = None
        self._decode_plans: dict[int | None, list[_DecodeGroup]] = {}
        self._chunks: list[_Chunk] = []
        slots: list[int] = []
        size = self._block_size
        for i, (query_len, seq_len) in enumerate(
            zip(batch.query_lens, batch.seq_lens, strict=True)
        ):
            table = batch.block_tables[i]
            prefix = seq_len - query_len
            if i >= batch.num_decodes:
                used = table[: -(-seq_len // size)]
                pieces = self._piece_index([used]) if prefix else None
                start, blocks = len(slots), torch.tensor(used)
                self._chunks.append(_Chunk(start, start + query_len, prefix, pieces, blocks))
            # A slot's number in layer 0, head 0: which piece, and where in it.
            step = self._pieces_per_block * size
            slots.extend(table[p // size] * step + p % size for p in range(prefix, seq_len))
        first = torch.tensor(slots, dtype=torch.int64, device=self._device)
        heads = torch.arange(self._num_kv_heads, device=self._device) * size
        self._key_slots = (first.unsqueeze(1) + heads).flatten()
        self._value_slots = self._key_slots + self._num_kv_heads * size

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        slots = self._slots[layer.index * self._pieces_per_layer * self._block_size :]
        keys = self._format.encode(key)
        slots.index_copy_(0, self._key_slots, keys.reshape(-1, self._row))
        if self._has_values:
            values = self._format.encode(value)
            slots.index_copy_(0, self._value_slots, values.reshape(-1, self._row))
        num_decodes = self._batch.num_decodes
        if num_decodes == query.shape[0]:
            return self._decode(layer, query)
        key = self._format.decode(keys)
        value = self._format.decode(values) if self._has_values else key
        out = query.new_empty(*query.shape[:2], self._value_dim)
        if num_decodes:
            out[:num_decodes] = self._decode(layer, query[:num_decodes])
        for chunk in self._chunks:
            self._prefill(layer, chunk, query, key, value, out)
        return out

    def _gather(
        self, layer: AttentionLayer, pieces: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of this layer, `[size, tokens, head_dim]` each, `size` sequences times
        KV heads; valid until the next call."""
        if len(pieces) > len(self._scratch):
            self._scratch = self._pieces.new_empty(len(pieces), self._pieces.shape[1])
        out = self._scratch[: len(pieces)]
        source = self._pieces[layer.index * self._pieces_per_layer :]
        torch.index_select(source, 0, pieces, out=out)
        decoded = self._format.decode(out.view(-1, self._row))
        keys, *values = decoded.view(len(self._piece_of_head), size, -1, self._head_dim)
        return keys, values[0] if values else keys

    def _piece_index(self, tables: list[list[int]]) -> torch.Tensor:
        """Flat index of layer 0's pieces, in the order [parts, sequences, heads, blocks];
        parts are key and value. Short tables are padded with block 0."""
        longest = max(len(table) for table in tables)
        padded = [table + [0] * (longest - len(table)) for table in tables]
        blocks = torch.tensor(padded, dtype=torch.int64, device=self._device)
        blocks = blocks.mul_(self._pieces_per_block).view(1, len(tables), 1, longest)
        return (blocks + self._piece_of_head.view(-1, 1, self._num_kv_heads, 1)).flatten()

    # ------------------------------------------------------------ decode

    def _decode(self, layer: AttentionLayer, query: torch.Tensor) -> torch.Tensor:
        """query: `[num_decodes, num_heads, head_dim]`."""
        if self._has_native and layer.logit_softcap is None:
            if self._native_plan is None:
                self._native_plan = self._plan_native()
            return native.decode_attention(
                query, self._caches[layer.index], *self._native_plan, layer.sliding_window,
                layer.scale,
            )  # fmt: skip
        window = layer.sliding_window
        groups = self._decode_plans.get(window)
        if groups is None:
            groups = self._decode_plans[window] = self._plan_decode(window)
        if len(groups) == 1:
            return self._decode_group(layer, groups[0], query)
        out = query.new_empty(*query.shape[:2], self._value_dim)
        for group in groups:
            out[group.rows] = self._decode_group(layer, group, query[group.rows])
        return out

    def _plan_native(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded block tables and lengths of the sequences that decode."""
        batch = self._batch
        tables = batch.block_tables[: batch.num_decodes]
        longest = max(len(table) for table in tables)
        padded = [table + [0] * (longest - len(table)) for table in tables]
        return torch.tensor(padded), torch.tensor(batch.seq_lens[: batch.num_decodes])

    def _plan_decode(self, window: int | None) -> list[_DecodeGroup]:
        """Groups the sequences so that padding never more than doubles the work, by what they
        read: with a window that is the blocks that it touches."""
        size = self._block_size
        lens = self._batch.seq_lens[: self._batch.num_decodes]
        firsts = [max(0, n - window) // size if window else 0 for n in lens]
        counts = [-(-n // size) - first for n, first in zip(lens, firsts, strict=True)]
        order = sorted(range(len(lens)), key=counts.__getitem__)
        groups: list[list[int]] = []
        for i in order:
            if groups and counts[i] <= 2 * counts[groups[-1][0]] + 4:
                groups[-1].append(i)
            else:
                groups.append([i])
        return [
            self._plan_group(sorted(g), firsts, counts, window, len(groups) == 1) for g in groups
        ]

    def _plan_group(
        self,
        members: list[int],
        firsts: list[int],
        counts: list[int],
        window: int | None,
        is_whole: bool,
    ) -> _DecodeGroup:
        size, batch = self._block_size, self._batch
        tables = [batch.block_tables[i][firsts[i] : firsts[i] + counts[i]] for i in members]
        # Keys [low, high) of what is gathered are seen.
        highs = [batch.seq_lens[i] - firsts[i] * size for i in members]
        lows = [max(0, high - window) if window else 0 for high in highs]
        # Whole blocks: a batched product copies keys that are no contiguous piece of memory.
        num_keys = max(len(table) for table in tables) * size
        mask = folded = None
        if any(lows) or min(highs) < num_keys:
            at = torch.arange(num_keys, device=self._device)
            low = torch.tensor(lows, device=self._device).unsqueeze(1)
            high = torch.tensor(highs, device=self._device).unsqueeze(1)
            hidden = (at < low) | (at >= high)  # [size, num_keys]
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask = mask.masked_fill_(hidden, -math.inf).view(len(members), 1, 1, num_keys)
            folded = mask.expand(-1, self._num_kv_heads, -1, -1).reshape(-1, 1, num_keys)
        rows = None if is_whole else torch.tensor(members, device=self._device)
        return _DecodeGroup(rows, len(members), num_keys, self._piece_index(tables), mask, folded)

    def _decode_group(
        self, layer: AttentionLayer, group: _DecodeGroup, query: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._gather(layer, group.pieces, group.size * self._num_kv_heads)
        if layer.logit_softcap is None and group.size * group.num_keys <= _FUSED_DECODE_KEYS:
            heads = (group.size, self._num_kv_heads)
            out = F.scaled_dot_product_attention(
                query.reshape(*heads, -1, self._head_dim),
                keys.unflatten(0, heads),
                values.unflatten(0, heads),
                attn_mask=group.mask,
                scale=layer.scale,
            )
            return out[..., : self._value_dim].reshape(*query.shape[:2], -1)
        folded = query.reshape(-1, self._group, self._head_dim)
        scores = _scores(layer, folded, keys, group.folded_mask)
        out = torch.bmm(torch.softmax(scores, -1), values)
        return out.view(query.shape)[..., : self._value_dim]

    # ------------------------------------------------------------ prefill

    def _prefill(
        self,
        layer: AttentionLayer,
        chunk: _Chunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends with one chunk and writes its rows of `out`."""
        kv_heads, rows = self._num_kv_heads, slice(chunk.start, chunk.end)
        if self._has_native and layer.logit_softcap is None:
            native.chunk_attention(
                query[rows], self._caches[layer.index], chunk.table, chunk.prefix,
                layer.sliding_window, layer.scale, out[rows],
            )  # fmt: skip
            return
        if chunk.pieces is None:
            keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
        else:
            length = chunk.prefix + chunk.end - chunk.start
            keys, values = (
                part[:, :length] for part in self._gather(layer, chunk.pieces, kv_heads)
            )
        # [num_kv_heads, group, chunk, head_dim]
        queries = query[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        outs = out[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        for start in range(0, chunk.end - chunk.start, _QUERY_ROWS):
            end = min(start + _QUERY_ROWS, chunk.end - chunk.start)
            seen = chunk.prefix + end
            position = chunk.prefix + start
            oldest = position - layer.sliding_window + 1 if layer.sliding_window else 0
            first = max(0, oldest)
            block = queries[:, :, start:end]
            scores = _scores(layer, block.flatten(1, 2), keys[:, first:seen])
            by_row = scores.view(kv_heads, -1, end - start, seen - first)
            by_row[..., seen - first - (end - start) :] += self._future[
                : end - start, : end - start
            ]
            if layer.sliding_window:
                # Row r no longer sees the keys before oldest + r.
                gone = torch.ones(end - start, seen - first, dtype=torch.bool, device=self._device)
                by_row.masked_fill_(gone.tril(oldest - first - 1), -math.inf)
            attended = torch.bmm(torch.softmax(scores, -1), values[:, first:seen])
            outs[:, :, start:end] = attended.view(block.shape)[..., : self._value_dim]


def _scores(
    layer: AttentionLayer,
    queries: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None = None,  # added, broadcast
) -> torch.Tensor:
    """Scaled, soft-capped `[heads, rows, keys]`."""
    keys = keys.transpose(1, 2)
    if mask is not None and layer.logit_softcap is None:
        return torch.baddbmm(mask, queries, keys, alpha=layer.scale)
    # beta = 0: the first argument only gives the dtype, its values are ignored.
    scores = torch.baddbmm(queries.new_empty(1, 1, 1), queries, keys, beta=0, alpha=layer.scale)
    if layer.logit_softcap is not None:
        scores = scores.div_(layer.logit_softcap).tanh_().mul_(layer.logit_softcap)
    return scores if mask is None else scores.add_(mask)
