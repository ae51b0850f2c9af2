"""Which bytes of whose KV blocks a decode rank needs, for workers whose blocks differ in shape.

A rank's block is `[num_layers, streams, its heads, block_size, row]`, contiguous. Two workers of
one model may cut the KV differently: into more or fewer tensor-parallel ranks, and into blocks of
another size. A plan says, for one destination rank, which pieces of which source blocks go where.
Both sides compute the same plan from the same facts, so a checksum for each copy, in plan order,
is all that they have to exchange about it. Pure: no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from core.errors import IncompatiblePeerError
from kv_transfer.base import Pieces


@dataclass(frozen=True, slots=True)
class KVShape:
    """How a worker's KV is cut into blocks and over its ranks.

    With as many heads as ranks or more, rank r has an equal share of consecutive heads; with
    fewer, ranks share: rank r has head `r * num_kv_heads // tensor_parallel_size`. One latent for
    all heads (MLA) is one head in one stream, and so a copy of it is on every rank.
    """

    num_layers: int
    num_streams: int  # key and value: 2; one latent: 1
    num_kv_heads: int  # of all ranks together
    row_bytes: int  # one token of one head in one stream, scales included
    block_size: int  # tokens
    tensor_parallel_size: int = 1
    # Of each layer: a query sees itself and the window - 1 tokens before it. Empty: sees all.
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        heads, ranks = self.num_kv_heads, self.tensor_parallel_size
        sizes = (self.num_layers, self.num_streams, heads, self.row_bytes, self.block_size, ranks)
        if min(sizes) < 1:
            raise ValueError(f"sizes of a KV shape are at least 1: {self}")
        if heads % ranks and ranks % heads:
            raise ValueError(
                f"{heads} KV heads cannot be divided among tensor_parallel_size {ranks}"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{len(self.sliding_windows)} windows for {self.num_layers} layers")

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.tensor_parallel_size)

    @property
    def block_bytes(self) -> int:
        """Of one block of one rank."""
        per_token = self.num_layers * self.num_streams * self.heads_per_rank * self.row_bytes
        return per_token * self.block_size

    def heads_of(self, rank: int) -> range:
        start = rank * self.num_kv_heads // self.tensor_parallel_size
        return range(start, start + self.heads_per_rank)

    def fields(self) -> dict[str, str]:
        """As entries of a compatibility map."""
        return {
            "num_layers": str(self.num_layers),
            "kv_streams": str(self.num_streams),
            "num_kv_heads": str(self.num_kv_heads),
            "kv_row_bytes": str(self.row_bytes),
            "block_size": str(self.block_size),
            "tensor_parallel_size": str(self.tensor_parallel_size),
        }

    def of_peer(self, compatibility: Mapping[str, str]) -> "KVShape":
        """The shape of a worker of the same model. Raises IncompatiblePeerError for a map that
        has none."""
        try:
            return replace(
                self,
                block_size=int(compatibility["block_size"]),
                tensor_parallel_size=int(compatibility["tensor_parallel_size"]),
            )
        except (KeyError, ValueError) as error:
            raise IncompatiblePeerError(f"the peer's KV shape cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """What one source block gives to one destination block."""

    source_rank: int
    source_position: int  # in the source's block table
    position: int  # in the destination's
    pieces: Pieces
    num_bytes: int


class CopyPlan:
    """What `rank` of the destination needs for a prompt of `num_tokens` tokens.

    Whole pairs of blocks are copied, the last one included. Of layers with a sliding window only
    those pairs of blocks go that a query behind the prompt can still see into: destination blocks
    before `first_whole_position` are incomplete, and nobody else may use them.
    """

    def __init__(
        self, source: KVShape, destination: KVShape, rank: int = 0, num_tokens: int = 0
    ) -> None:
        small, large = sorted((source.block_size, destination.block_size))
        if large % small:
            raise IncompatiblePeerError(f"block_size {large} is no multiple of {small}")
        self.source, self.destination = source, destination
        self.num_tokens = num_tokens
        self._step = small  # tokens of a pair of blocks
        self._shares = _shares(source, destination, rank)

    @property
    def first_whole_position(self) -> int:
        """The destination's blocks from here on get every layer."""
        windows = [w for w in self.source.sliding_windows if w is not None]
        if not windows:
            return 0
        unseen = self.num_tokens + 1 - min(windows)  # tokens that some layer needs no more
        return max(0, (unseen - self._step) // self.destination.block_size + 1)

    def copies(self, start: int, stop: int, first_token: int = 0) -> list[BlockCopy]:
        """For the source's blocks at positions [start, stop), from `first_token` on, which is
        where one of the destination's blocks begins. In the order of tokens, then of source
        ranks: the copies of consecutive ranges, joined, are those of the whole."""
        found: list[BlockCopy] = []
        source_size, size = self.source.block_size, self.destination.block_size
        begin = max(start * source_size, first_token)
        for token in range(begin, stop * source_size, self._step):
            if token >= self.num_tokens:
                break
            layers = self._layers(token + self._step)
            if not layers:
                continue
            source_position, source_offset = divmod(token, source_size)
            position, offset = divmod(token, size)
            for share in self._shares:
                pieces, num_bytes = _pieces(
                    self.source, self.destination, share, layers, source_offset, offset, self._step
                )
                found.append(BlockCopy(share.rank, source_position, position, pieces, num_bytes))
        return found

    def _layers(self, end: int) -> tuple[int, ...]:
        """Those that the next query can see into tokens before `end` in."""
        windows = self.source.sliding_windows or (None,) * self.source.num_layers
        return _visible(windows, self.num_tokens + 1 - end)


@dataclass(frozen=True, slots=True)
class _Share:
    """Heads that one source rank gives, by their place in both blocks."""

    rank: int
    source_head: int
    head: int
    num_heads: int


@lru_cache(maxsize=256)
def _shares(source: KVShape, destination: KVShape, rank: int) -> tuple[_Share, ...]:
    wanted = destination.heads_of(rank)
    per_head = source.tensor_parallel_size // source.num_kv_heads
    if per_head > 1:  # several ranks have each head: spread the readers over them
        return tuple(
            _Share(head * per_head + rank % per_head, 0, head - wanted.start, 1) for head in wanted
        )
    shares = []
    size = source.heads_per_rank
    for giver in range(wanted.start // size, (wanted.stop - 1) // size + 1):
        has = source.heads_of(giver)
        start, stop = max(has.start, wanted.start), min(has.stop, wanted.stop)
        shares.append(_Share(giver, start - has.start, start - wanted.start, stop - start))
    return tuple(shares)


@lru_cache(maxsize=256)
def _visible(windows: tuple[int | None, ...], distance: int) -> tuple[int, ...]:
    """Layers whose window reaches a token that is `distance` or less behind the query."""
    return tuple(i for i, window in enumerate(windows) if window is None or window > distance)


@lru_cache(maxsize=1024)
def _pieces(
    source: KVShape,
    destination: KVShape,
    share: _Share,
    layers: tuple[int, ...],
    source_token: int,
    token: int,
    num_tokens: int,
) -> tuple[Pieces, int]:
    """The contiguous pieces of a region, neighbours joined, and their bytes together."""
    row, streams = source.row_bytes, source.num_streams
    length = num_tokens * row
    merged: list[tuple[int, int, int]] = []
    for layer in layers:
        for stream in range(streams):
            plane = layer * streams + stream
            for i in range(share.num_heads):
                source_head = plane * source.heads_per_rank + share.source_head + i
                head = plane * destination.heads_per_rank + share.head + i
                read = (source_head * source.block_size + source_token) * row
                write = (head * destination.block_size + token) * row
                if merged:
                    last_read, last_write, last_length = merged[-1]
                    if (last_read + last_length, last_write + last_length) == (read, write):
                        merged[-1] = (last_read, last_write, last_length + length)
                        continue
                merged.append((read, write, length))
    return tuple(merged), len(layers) * streams * share.num_heads * length
