"""Weight-only quantisation, made at load from the final weights.

int8: one scale for each output channel, symmetric. int4: `INT4_GROUP` inputs share a scale and a
midpoint, and the head stays int8. Activations keep the model's dtype.

A product that reads quantised weights pays for few rows: its cost grows with every row, while
a plain matrix product hardly notices the first 32. So beyond `*_ROWS` rows a weight is widened to
the model's dtype for the one product, one matrix at a time. `TiledLinear` is the fast way, where
`engine.native` is; the other two are torch's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F

from engine import native
from engine.model.layers import Linear, Projection

Quantization = Literal["none", "int8", "int4"]

INT4_GROUP = 32
_CHUNK_ELEMENTS = 1 << 18  # of a weight that are quantised at once
_TILE = 64  # output channels that a kernel reads as one piece
_INT8_KERNEL_ROWS = 8
# torch's int8 kernel for bfloat16 reads past the end of rows that this does not divide.
_INT8_KERNEL_INPUTS = 16
_NATIVE_ROWS = 16
_INT4_KERNEL_ROWS = 16


@dataclass(slots=True)
class Int8Linear:
    """weight[o, i] = values[o, i] * scales[o]"""

    values: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # [out], in the model's dtype
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        can_read = x.device.type == "cpu" and x.shape[1] % _INT8_KERNEL_INPUTS == 0
        if can_read and x.shape[0] <= _INT8_KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), self.values, self.scales)
        else:
            out = F.linear(x, self.values.to(x.dtype)).mul_(self.scales)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(slots=True)
class TiledLinear:
    """Either kind in the order that the native product reads (`native.Weight`)."""

    tiles: native.Weight
    scales: torch.Tensor
    bias: torch.Tensor | None
    wide: native.WideScratch | None  # of this shape; all layers' products share it

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide is None or x.shape[0] <= _NATIVE_ROWS:
            parts = [native.linear(rows, self.tiles) for rows in x.split(native.MAX_ROWS)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        self.wide.fill(self.tiles)
        is_int4 = self.tiles.kind == native.KINDS["int4"]  # its scales are in what was widened
        out = torch.ops.mkldnn._linear_pointwise(
            x, self.wide.packed, self.bias if is_int4 else None, "none", [], ""
        )
        if is_int4:
            return out
        out.mul_(self.scales)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(slots=True)
class Int4Linear:
    """weight[o, i] = (value - 8) * scale + midpoint, of the group of inputs that i is in."""

    tiles: torch.Tensor  # uint8 [out / 64, in, 32]: channel n of a tile, and above it n + 32
    scales_midpoints: torch.Tensor  # [in / group, out, 2], in the model's dtype
    has_kernel: bool
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.has_kernel and x.shape[0] <= _INT4_KERNEL_ROWS:
            num_outputs = self.scales_midpoints.shape[1]
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(),
                self.tiles.view(num_outputs, -1),
                INT4_GROUP,
                self.scales_midpoints,
            )
            return out if self.bias is None else out.add_(self.bias)
        weight = self._transposed()
        return x @ weight if self.bias is None else torch.addmm(self.bias, x, weight)

    def _transposed(self) -> torch.Tensor:
        """The weight in the model's dtype, `[in, out]`."""
        num_groups, num_outputs, _ = self.scales_midpoints.shape
        tiles, num_inputs, half = self.tiles.shape
        dtype = self.scales_midpoints.dtype
        weight = self.tiles.new_empty((num_inputs, tiles, 2, half), dtype=dtype)
        by_input = self.tiles.transpose(0, 1)
        weight[:, :, 0] = by_input & 15
        weight[:, :, 1] = by_input >> 4
        groups = weight.view(num_groups, INT4_GROUP, num_outputs)
        scales, midpoints = self.scales_midpoints.unsqueeze(1).unbind(-1)
        return groups.sub_(8).mul_(scales).add_(midpoints).view(num_inputs, num_outputs)


def quantised(
    linear: Linear, quantization: Quantization, *, expects_many_rows: bool = True
) -> Projection:
    """The same projection with a quantised weight. A shape that int4's groups and tiles do not
    divide becomes int8. Without `expects_many_rows` it needs no memory for those."""
    num_outputs, num_inputs = shape = linear.weight.shape
    divides = num_outputs % _TILE == 0 and num_inputs % INT4_GROUP == 0
    is_int4 = quantization == "int4" and divides
    wide = None
    has_native = divides and linear.weight.dtype == torch.bfloat16 and native.library() is not None
    if has_native and linear.weight.device.type == "cpu" and expects_many_rows:
        wide = native.wide_scratch(*shape)
        has_native = wide is not None
    if not has_native:
        return _int4(linear) if is_int4 else _int8(linear)
    kind: Literal["int8", "int4"] = "int4" if is_int4 else "int8"
    tiles, scales = _tiled(linear.weight, is_int4)
    read = native.Weight(kind, tiles, scales, linear.bias, num_inputs, num_outputs)
    return TiledLinear(read, scales, linear.bias, wide)


def _tiled(weight: torch.Tensor, is_int4: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and scales as `native.Weight` has them, some rows at a time."""
    num_outputs, num_inputs = weight.shape
    shape = (num_outputs // _TILE, num_inputs // 2, _TILE)
    if is_int4:
        tiles = torch.empty(shape, dtype=torch.uint8)
    else:
        tiles = torch.empty((*shape, 2), dtype=torch.int8)
    all_scales = []
    for rows in _row_chunks(weight):
        values, scales = (_int4_values if is_int4 else _int8_values)(weight[rows])
        part = values.view(-1, _TILE, num_inputs // 2, 2).transpose(1, 2)
        start = rows.start // _TILE
        into = tiles[start : start + len(part)]
        into.copy_(part[..., 0] | part[..., 1] << 4 if is_int4 else part)
        all_scales.append(scales)
    scales = torch.cat(all_scales)
    if is_int4:
        scales = scales.unflatten(0, (-1, _TILE)).permute(0, 2, 3, 1)
    return tiles, scales.contiguous()


def _int8(linear: Linear) -> Int8Linear:
    return Int8Linear(*_int8_values(linear.weight), linear.bias)


def _int8_values(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 `[out, in]` and scales `[out]`."""
    values = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty(weight.shape[0])
    for rows in _row_chunks(weight):
        wide = weight[rows].to(torch.float32, copy=True)
        # Rounded to the narrow type first: what is stored is what the values are rounded against.
        scales[rows] = (wide.abs().amax(dim=1) / 127).clamp_min(1e-10)
        values[rows] = wide.div_(scales[rows].float().unsqueeze(1)).round_().clamp_(-127, 127)
    return values, scales


def _row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Whole tiles. Float32 copies of a whole matrix would be most of a load's peak."""
    step = max(_TILE, _CHUNK_ELEMENTS // weight.shape[1] // _TILE * _TILE)
    return (slice(start, start + step) for start in range(0, weight.shape[0], step))


def _int4(linear: Linear) -> Int4Linear:
    values, scales_midpoints = _int4_values(linear.weight)
    return Int4Linear(
        _tiles(values),
        scales_midpoints.transpose(0, 1).contiguous(),
        _has_int4_kernel(linear.weight.dtype, linear.weight.device.type),
        linear.bias,
    )


def _int4_values(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 `[out, in]` below 16, and `[out, in / group, 2]`: scale and midpoint."""
    values = torch.empty_like(weight, dtype=torch.uint8)
    scales_midpoints = weight.new_empty(weight.shape[0], weight.shape[1] // INT4_GROUP, 2)
    for rows in _row_chunks(weight):
        groups = weight[rows].to(torch.float32, copy=True).unflatten(1, (-1, INT4_GROUP))
        low, high = groups.aminmax(dim=-1)
        scales = ((high - low) / 15).clamp_min(1e-10)
        scales_midpoints[rows] = torch.stack((scales, low + 8 * scales), dim=-1).to(weight.dtype)
        scales, midpoints = scales_midpoints[rows].float().unsqueeze(-2).unbind(-1)
        groups.sub_(midpoints).div_(scales).add_(8).round_().clamp_(0, 15)
        values[rows] = groups.flatten(1).to(torch.uint8)
    return values, scales_midpoints


def _tiles(values: torch.Tensor) -> torch.Tensor:
    """uint8 `[out, in]` below 16 -> Int4Linear.tiles."""
    tiles = values.unflatten(0, (-1, 2, _TILE // 2))
    return (tiles[:, 0] | tiles[:, 1] << 4).transpose(1, 2).contiguous()


@cache
def _has_int4_kernel(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch has the kernel, and with this order of the tiles: it is torch's own affair,
    and differs between processors."""
    if device_type != "cpu":
        return False
    generator = torch.Generator().manual_seed(0)
    shape = (2 * _TILE, 2 * INT4_GROUP)
    values = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
        x = torch.ones(1, shape[1], dtype=dtype)
        scales = torch.ones(2, shape[0], 2, dtype=dtype)
        torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, INT4_GROUP, scales)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(packed.flatten(), _tiles(values).flatten())
