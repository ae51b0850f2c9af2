"""What a piece of KV looks like on a wire that is slower than a processor.

zstd loses nothing: the bytes of numbers are sorted by their place first, since those of exponents
repeat and those of mantissas hardly do. int8 rounds bf16 rows to 8 bits a number with a scale for
each row, as an int8 KV cache does: half the bytes, and what arrives is not what was sent.
"""

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from core.errors import HandoverError

Compression = Literal["none", "zstd", "int8"]
_LEVEL = 1
_LENGTH = struct.Struct("<I")
_LARGEST = 127.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the pieces of one stream are encoded. `row_bytes`: of one token of one head, whose scale
    int8 shares; pieces are whole rows."""

    name: Compression = "none"
    item_bytes: int = 1
    row_bytes: int = 1

    def piece_bytes(self, most: int) -> int:
        """Raw bytes in a piece, at most `most` where a row is no larger than that."""
        unit = self.row_bytes if self.name == "int8" else self.item_bytes
        return max(unit, most // unit * unit)

    def encode(self, data: bytes) -> bytes:
        """Releases the GIL most of the time; run it in a thread."""
        if self.name == "zstd":
            from zstandard import ZstdCompressor

            whole = len(data) // self.item_bytes * self.item_bytes
            planes = np.frombuffer(data[:whole], np.uint8).reshape(-1, self.item_bytes).T
            sorted_bytes = np.ascontiguousarray(planes).tobytes() + data[whole:]
            return ZstdCompressor(level=_LEVEL).compress(sorted_bytes)
        rows = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        rows = rows.view(-1, self.row_bytes // 2).float()
        scales = rows.abs().amax(dim=1, keepdim=True).div_(_LARGEST).clamp_min_(1e-20)
        values = (rows / scales).round_().to(torch.int8)
        return _LENGTH.pack(len(rows)) + scales.numpy().tobytes() + values.numpy().tobytes()

    def decode(self, data: memoryview, most: int) -> memoryview:
        """At most `most` bytes. Raises HandoverError for what `encode` never made."""
        try:
            decoded = self._unzstd(data, most) if self.name == "zstd" else self._unround(data, most)
        except (ValueError, struct.error) as error:
            raise HandoverError(f"a piece of KV cannot be decoded: {error}") from error
        return memoryview(decoded).cast("B")

    def _unzstd(self, data: memoryview, most: int) -> bytes:
        import zstandard

        try:
            # Says how much memory it would take before it is taken.
            size = zstandard.get_frame_parameters(data).content_size
            if size > most:
                raise ValueError(f"{size} bytes, {most} at most were expected")
            sorted_bytes = zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        whole = len(sorted_bytes) // self.item_bytes * self.item_bytes
        planes = np.frombuffer(sorted_bytes[:whole], np.uint8).reshape(self.item_bytes, -1)
        return np.ascontiguousarray(planes.T).tobytes() + sorted_bytes[whole:]

    def _unround(self, data: memoryview, most: int) -> bytes:
        (num_rows,) = _LENGTH.unpack_from(data)
        row = self.row_bytes // 2
        values_at = _LENGTH.size + 4 * num_rows
        if num_rows * self.row_bytes > most or len(data) != values_at + num_rows * row:
            raise ValueError(f"{len(data)} bytes for {num_rows} rows")
        scales = np.frombuffer(data[_LENGTH.size : values_at], np.float32).reshape(-1, 1)
        values = np.frombuffer(data[values_at:], np.int8).reshape(-1, row)
        rows = torch.from_numpy(values * scales).to(torch.bfloat16)
        return rows.view(torch.uint8).numpy().tobytes()
