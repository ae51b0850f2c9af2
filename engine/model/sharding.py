"""How the weights of a model are cut among the ranks of a tensor-parallel worker.

A projection has two axes, its outputs and its inputs, and each is declared once: whole, or cut by
heads, by features or by vocabulary. What a rank's outputs are, is what the next projection's
inputs are (Shoeybi et al., arXiv:1909.08053):

    weight                   outputs             inputs
    q, k, v (or qkv)         heads, KV heads     whole
    o                        whole               heads       sums over ranks
    gate, up (or gate_up)    features            whole
    down                     whole               features    sums over ranks
    router of experts        whole               whole       the same on every rank
    embedding, head          vocabulary          whole       sums; gathers

Experts are cut like any MLP: a rank has a slice of every expert, so that ranks have equal work
whatever the router chooses, and one sum serves both kinds. A bias on cut inputs belongs to rank 0,
so that the sum has it once.
"""

from dataclasses import dataclass

import torch

from core.errors import ModelError
from engine.model.host_memory import release_pages

# Cuts between features fall on edges of int4's groups; two such slices, gate's and up's, fill the
# tiles of the native kernels.
_EDGE = 32
_CHUNK_BYTES = 4 << 20  # of a mapped file that are resident at once


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a weight: its size in the checkpoint, and the ranges that this rank holds, one
    after the other. `padding` follows them: rows of zeros that no checkpoint has."""

    size: int
    ranges: tuple[slice, ...]
    padding: int = 0

    @property
    def is_cut(self) -> bool:
        return self.ranges != (slice(0, self.size),)

    @property
    def num_own(self) -> int:
        return sum(part.stop - part.start for part in self.ranges) + self.padding


def whole(size: int) -> Axis:
    return Axis(size, (slice(0, size),))


def joined(*axes: Axis) -> Axis:
    """Of a tensor that holds several one after the other."""
    ranges: list[slice] = []
    start = 0
    for axis in axes:
        ranges += [slice(start + part.start, start + part.stop) for part in axis.ranges]
        start += axis.size
    return Axis(start, tuple(ranges))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that is rank `rank`'s of `size`."""

    rank: int = 0
    size: int = 1

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Raises ModelError where heads cannot be cut into equal parts."""
        if num_heads % self.size:
            raise ModelError(
                f"tensor_parallel_size {self.size} does not divide num_attention_heads {num_heads}"
            )
        if num_kv_heads % self.size and self.size % num_kv_heads:
            raise ModelError(
                f"tensor_parallel_size {self.size} and num_key_value_heads {num_kv_heads}: "
                "expected that one divides the other"
            )

    def num_own_heads(self, num_heads: int) -> int:
        return max(1, num_heads // self.size)

    def heads(self, num_heads: int, head_dim: int) -> Axis:
        """Equal parts; of fewer heads than ranks, each is held by several ranks."""
        first = self.rank * num_heads // self.size
        start, end = first * head_dim, (first + self.num_own_heads(num_heads)) * head_dim
        return Axis(num_heads * head_dim, (slice(start, end),))

    def features(self, size: int) -> Axis:
        """About equal parts. Raises ModelError if a rank would have none."""
        unit = _EDGE if size % _EDGE == 0 and size // _EDGE >= self.size else 1
        start, end = (r * (size // unit) // self.size * unit for r in (self.rank, self.rank + 1))
        if start == end:
            raise ModelError(
                f"tensor_parallel_size {self.size}: an MLP of {size} features has too few"
            )
        return Axis(size, (slice(start, end),))

    def vocabulary(self, size: int) -> Axis:
        """Equal parts, the last ones padded."""
        part = -(-size // self.size)
        start = min(size, self.rank * part)
        end = min(size, start + part)
        return Axis(size, (slice(start, end),), padding=part - (end - start))


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of the checkpoint goes: its whole shape there, and for every piece of it
    that this rank holds the parameter's view and the index of the piece."""

    shape: tuple[int, ...]
    pieces: list[tuple[torch.Tensor, tuple[slice, ...]]]

    @property
    def num_own(self) -> int:
        return sum(view.numel() for view, _ in self.pieces)

    def fill(self, tensor: torch.Tensor, is_mapped: bool = False) -> None:
        """Of a memory-mapped tensor only the pieces are read, and their pages are given back
        behind the reading."""
        for view, index in self.pieces:
            piece = tensor[index]
            if not is_mapped:
                view.copy_(piece)
                continue
            step = max(1, _CHUNK_BYTES // piece[0].nbytes)
            for into, rows in zip(view.split(step), piece.split(step), strict=True):
                into.copy_(rows)
                if rows.is_contiguous():
                    release_pages(rows.data_ptr(), rows.nbytes)


def target(parameter: torch.Tensor, *axes: Axis) -> Target:
    """A parameter for one tensor; `axes` beyond the first have one range."""
    shape = tuple(axis.size for axis in axes)
    others = tuple(axis.ranges[0] for axis in axes[1:])
    pieces = []
    start = 0
    for part in axes[0].ranges:
        end = start + part.stop - part.start
        if end > start:
            pieces.append((parameter[start:end], (part, *others)))
        start = end
    return Target(shape, pieces)
