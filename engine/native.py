"""The few operations of native.cpp, compiled on first use where there is a C++ compiler.

Only bfloat16 on processors with AVX512-BF16 has them; anywhere else, and whenever something about
the build fails, `library()` is None and torch's own operations serve. PDSERVE_NATIVE=0 turns them
off. A compiled library stays under the XDG cache, named by the source that it was made of.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
TILE = 64  # output channels
# oneDNN orders a packed weight for a typical number of rows; measured, this one is within a few
# percent of the best from 1 to 1024.
PACKED_FOR_ROWS = 64
# Up to here the native product beats oneDNN's: 2 times at 1 row, even at about 40.
MAX_ROWS = 32
_FLAGS = [
    "-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp",
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16",
]  # fmt: skip
_COMPILE_SECONDS = 60
# As in native.cpp.
_MAX_GROUP_NUMBERS = 4096
_MAX_BLOCK = 1024


_is_off = False


def library() -> ctypes.CDLL | None:
    """Of this process; compiles at most once."""
    return None if _is_off else _library()


@contextmanager
def turned_off() -> Iterator[None]:
    """For comparisons: what is loaded and run inside uses torch alone."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("PDSERVE_NATIVE") == "0":
        return None
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return None
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        logger.info("no C++ compiler: decoding with torch's own operations, which are slower")
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler))))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("native operations are not available: %s", str(detail).strip()[:300])
        return None


def _built(compiler: str) -> Path:
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "native"
    target = cache / f"{key}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Several workers may build at once: each its own file, and the last rename stands.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / target.name
        subprocess.run(
            [compiler, *_FLAGS, str(SOURCE), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        made.rename(target)
    return target


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_long
    loaded.pdserve_linear_bf16.argtypes = [*[pointer] * 4, *[size] * 3, ctypes.c_int]
    loaded.pdserve_linear_bf16.restype = None
    for kind in ("int8", "int4"):
        linear = getattr(loaded, f"pdserve_linear_{kind}")
        linear.argtypes, linear.restype = [*[pointer] * 5, *[size] * 3, ctypes.c_int], None
        widen = getattr(loaded, f"pdserve_widen_{kind}")
        widen.argtypes, widen.restype = [*[pointer] * 3, *[size] * 2, ctypes.c_int], None
    loaded.pdserve_decode_attention_bf16.argtypes = [
        pointer, size, pointer, size, pointer, size, pointer, pointer,
        *[size] * 6, ctypes.c_float, ctypes.c_int,
    ]  # fmt: skip
    loaded.pdserve_decode_attention_bf16.restype = None
    loaded.pdserve_rms_norm_bf16.argtypes = [*[pointer] * 3, *[size] * 2, ctypes.c_float]
    loaded.pdserve_rms_norm_bf16.restype = None
    return loaded


def tiles_address(packed: torch.Tensor, plain: torch.Tensor) -> int | None:
    """Where oneDNN keeps a packed bfloat16 weight, if it is in the order that the native product
    reads, `[out / 64, in / 2, 64, 2]`: which order oneDNN takes is its own affair."""
    num_outputs, num_inputs = plain.shape
    if library() is None or num_outputs % TILE or num_inputs % 2:
        return None
    if torch.ops.mkldnn._nbytes(packed) != plain.nbytes:
        return None
    address: int = torch.ops.mkldnn.data_ptr(packed)
    stored = torch.frombuffer(
        (ctypes.c_char * plain.nbytes).from_address(address), dtype=plain.dtype
    )
    tiles = plain.view(num_outputs // TILE, TILE, num_inputs // 2, 2).transpose(1, 2)
    return address if torch.equal(stored.view(tiles.shape), tiles) else None


def linear_bf16(
    x: torch.Tensor, tiles: int, num_outputs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """x bfloat16 `[T, in]`, `tiles` from `tiles_address` -> `[T, out]`."""
    loaded = library()
    assert loaded is not None
    x = x.contiguous()
    rows, num_inputs = x.shape
    out = x.new_empty(rows, num_outputs)
    loaded.pdserve_linear_bf16(
        x.data_ptr(),
        tiles,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        num_inputs,
        num_outputs,
        torch.get_num_threads(),
    )
    return out


def linear_quantised(
    kind: str,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    num_outputs: int,
) -> torch.Tensor:
    """x bfloat16 `[T, in]`. int8: tiles `[out / 64, in / 2, 64, 2]`, scales `[out]`; int4: tiles
    uint8 `[out / 64, in / 2, 64]`, the odd input above the even one, scales
    `[out / 64, in / 32, 2, 64]`: scales and midpoints. Scales and bias are bfloat16, and `in` is
    a multiple of 32."""
    x = x.contiguous()
    rows, num_inputs = x.shape
    out = x.new_empty(rows, num_outputs)
    getattr(library(), f"pdserve_linear_{kind}")(
        x.data_ptr(),
        tiles.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        num_inputs,
        num_outputs,
        torch.get_num_threads(),
    )
    return out


class WideScratch:
    """A weight in oneDNN's own order, written again for each product with many rows: what holds
    quantised weights then has one plain matrix at a time. One for each shape."""

    def __init__(self, num_outputs: int, num_inputs: int, packed: torch.Tensor, tiles: int) -> None:
        self._shape = (num_inputs, num_outputs)
        self.packed = packed
        self._tiles = tiles

    def fill(self, kind: str, tiles: torch.Tensor, scales: torch.Tensor) -> None:
        """As `linear_quantised` has them; int8 without its scales."""
        getattr(library(), f"pdserve_widen_{kind}")(
            tiles.data_ptr(), scales.data_ptr(), self._tiles, *self._shape, torch.get_num_threads()
        )


@functools.cache
def wide_scratch(num_outputs: int, num_inputs: int) -> WideScratch | None:
    """None where oneDNN has another order, or nothing is native."""
    if library() is None or num_inputs % 32:
        return None
    numbers = torch.arange(251).to(torch.bfloat16)  # a prime: no order looks like another
    size = num_outputs * num_inputs
    plain = numbers.repeat(size // 251 + 1)[:size].view(num_outputs, num_inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACKED_FOR_ROWS)
    tiles = tiles_address(packed, plain)
    return None if tiles is None else WideScratch(num_outputs, num_inputs, packed, tiles)


def can_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[0] <= MAX_ROWS
        and x.shape[-1] % 16 == 0
        and x.is_contiguous()
        and library() is not None
    )


def rms_norm_bf16(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As F.rms_norm over the last dimension; only after `can_norm`."""
    loaded = library()
    assert loaded is not None
    out = torch.empty_like(x)
    size = x.shape[-1]
    loaded.pdserve_rms_norm_bf16(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps
    )
    return out


def can_attend(kv_cache: torch.Tensor, num_heads: int) -> bool:
    """Whether `decode_attention_bf16` reads this cache, `[blocks, layers, 2, heads, size, dim]`."""
    _, _, _, kv_heads, block_size, dim = kv_cache.shape
    return (
        kv_cache.dtype == torch.bfloat16
        and kv_cache.device.type == "cpu"
        and dim % 32 == 0
        and block_size <= _MAX_BLOCK
        and num_heads // kv_heads * dim <= _MAX_GROUP_NUMBERS
        and library() is not None
    )


def decode_attention_bf16(
    query: torch.Tensor,  # [S, heads, dim], a row in one piece
    kv_cache: torch.Tensor,
    layer: int,
    tables: torch.Tensor,  # int64 [S, blocks]
    lens: torch.Tensor,  # int64 [S], with the query's own token
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one token a sequence over the blocks in place; only after `can_attend`."""
    loaded = library()
    assert loaded is not None
    _, _, _, kv_heads, block_size, dim = kv_cache.shape
    sequences, heads, _ = query.shape
    if query.stride()[1:] != (dim, 1):
        query = query.contiguous()
    out = query.new_empty(query.shape)
    loaded.pdserve_decode_attention_bf16(
        query.data_ptr(),
        query.stride(0),
        kv_cache.data_ptr() + layer * kv_cache.stride(1) * kv_cache.itemsize,
        kv_cache.stride(0),
        tables.data_ptr(),
        tables.shape[1],
        lens.data_ptr(),
        out.data_ptr(),
        sequences,
        kv_heads,
        heads // kv_heads,
        block_size,
        dim,
        window or 0,
        scale,
        torch.get_num_threads(),
    )
    return out
