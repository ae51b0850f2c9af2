"""The operations of this folder's C++ files, compiled on first use where there is a C++ compiler.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
TILE = 64  # output channels
# oneDNN orders a packed weight for a typical number of rows; measured, this one is within a few
# percent of the best from 1 to 1024.
PACKED_FOR_ROWS = 64
# Up to here the native product beats oneDNN's: 2 times at 1 row, even at about 40. As in bf16.h.
MAX_ROWS = 32
# Of a prompt, plain weights: with more these idle threads are worth what offering them work costs.
# Steps that only decode lose 7 percent by it where no core is idle.
FEW_ROWS = 16
_FLAGS = [
    "-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp",
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni",
]  # fmt: skip
_COMPILE_SECONDS = 60
# As in the sources.
DIMS = (32, 64, 96, 128, 256)  # of a head, that attention is compiled for
KINDS = {"plain": 0, "int8": 1, "int4": 2}


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
    sources = sorted(FOLDER.glob("*.cpp"))
    content = b"".join(path.read_bytes() for path in [*sources, *sorted(FOLDER.glob("*.h"))])
    key = hashlib.sha256(content + " ".join(_FLAGS).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "native"
    target = cache / f"{key}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Several workers may build at once: each its own file, and the last rename stands.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / target.name
        subprocess.run(
            [compiler, *_FLAGS, *map(str, sources), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        made.rename(target)
    return target


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    arguments = {
        "linear": [pointer, pointer, pointer, size, number],
        "widen": [pointer, pointer, number],
        "rms_norm": [*[pointer] * 3, *[size] * 2, ctypes.c_float, number],
        "silu_mul": [*[pointer] * 2, *[size] * 2, number],
        "layers": [pointer, pointer, *[number] * 3],
        "hand_counts": [pointer, pointer],
        "settle": [pointer, number],
        "decode_attention": [
            pointer,
            pointer,
            size,
            pointer,
            size,
            pointer,
            pointer,
            *[size] * 3,
            ctypes.c_float,
            number,
        ],
        "chunk_attention": [
            pointer,
            pointer,
            size,
            pointer,
            pointer,
            *[size] * 4,
            ctypes.c_float,
            number,
        ],
    }
    for name, types in arguments.items():
        function = getattr(loaded, f"pdserve_{name}")
        function.argtypes, function.restype = types, None
    return loaded


_idle_threads = 0


def idle_threads() -> int:
    return _idle_threads


def set_idle_threads(count: int) -> None:
    """Like `torch.set_num_threads`, of the process: how many threads of the lowest priority may
    compute for prompts beside those, on cores that have nothing else to do (`hands.h`)."""
    global _idle_threads
    _idle_threads = count


def await_hands() -> Callable[[], int]:
    """What waits until no idle thread has work, for at most a second: before what they read is
    freed. Says whether none has."""
    loaded = library()
    assert loaded is not None
    wait: Callable[[], int] = loaded.pdserve_await_hands
    return wait


def hand_counts() -> tuple[int, int]:
    """Pieces of work that idle threads did in this process, and that were taken from them again
    because their core was."""
    loaded = library()
    if loaded is None:
        return 0, 0
    counts = ctypes.c_long(), ctypes.c_long()
    loaded.pdserve_hand_counts(*map(ctypes.byref, counts))
    return counts[0].value, counts[1].value


def settle_threads() -> None:
    """Gives the calling thread and those that compute for it a core each, if there are as many as
    this process may use: left to itself, the kernel puts two of them on one core for
    milliseconds, whenever something short runs on the other. There they let whatever wakes up
    beside them run at once: what carries tokens on their way takes microseconds. Fewer threads
    share the host with other workers, and stay as they are."""
    loaded, threads = library(), torch.get_num_threads()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if loaded is not None and threads == len(cpus) > 1:
        loaded.pdserve_settle((ctypes.c_int * threads)(*cpus), threads)


class Weight(ctypes.Structure):
    """What a product reads, `Linear` in bf16.h. Keeps what it points to alive."""

    _fields_ = [
        ("kind", ctypes.c_long),
        ("tiles", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
    ]

    def __init__(
        self,
        kind: str,
        tiles: torch.Tensor | int,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        num_inputs: int,
        num_outputs: int,
    ) -> None:
        """plain: the address of bfloat16 tiles `[out / 64, in / 2, 64, 2]`; int8: tiles of the
        same order, scales `[out]`; int4: tiles uint8 `[out / 64, in / 2, 64]`, the odd input above
        the even one, scales `[out / 64, in / 32, 2, 64]`: scales and midpoints. Scales and bias
        are bfloat16; quantised, `in` is a multiple of 32."""
        self._alive = (tiles, scales, bias)
        super().__init__(
            KINDS[kind],
            tiles if isinstance(tiles, int) else tiles.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            num_inputs,
            num_outputs,
        )


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


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x bfloat16 `[T, in]`, T at most MAX_ROWS -> `[T, out]`."""
    loaded = library()
    assert loaded is not None and x.shape[0] <= MAX_ROWS
    x = x.contiguous()
    rows = x.shape[0]
    out = x.new_empty(rows, weight.outputs)
    loaded.pdserve_linear(
        ctypes.addressof(weight), x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads()
    )
    return out


class WideScratch:
    """A weight in oneDNN's own order, written again for each product with many rows: what holds
    quantised weights then has one plain matrix at a time. One for each shape."""

    def __init__(self, packed: torch.Tensor, tiles: int) -> None:
        self.packed = packed
        self._tiles = tiles

    def fill(self, weight: Weight) -> None:
        """int8 comes without its scales."""
        loaded = library()
        assert loaded is not None
        loaded.pdserve_widen(ctypes.addressof(weight), self._tiles, torch.get_num_threads())


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
    return None if tiles is None else WideScratch(packed, tiles)


def can_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[-1] % 16 == 0
        and x.is_contiguous()
        and library() is not None
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As F.rms_norm over the last dimension; only after `can_norm`."""
    loaded = library()
    assert loaded is not None
    out = torch.empty_like(x)
    size = x.shape[-1]
    loaded.pdserve_rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def can_silu_mul(gate_up: torch.Tensor) -> bool:
    return (
        gate_up.dtype == torch.bfloat16
        and gate_up.device.type == "cpu"
        and gate_up.shape[-1] % 32 == 0
        and gate_up.is_contiguous()
        and library() is not None
    )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows `[gate, up]`; only after `can_silu_mul`."""
    loaded = library()
    assert loaded is not None
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    loaded.pdserve_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
    return out


class LayerCache(ctypes.Structure):
    """One layer of a KV cache `[blocks, layers, 2, kv_heads, block_size, dim]`."""

    _fields_ = [("base", ctypes.c_void_p)] + [
        (name, ctypes.c_long) for name in ("block_stride", "kv_heads", "block_size", "dim")
    ]

    def __init__(self, kv_cache: torch.Tensor, layer: int) -> None:
        _, _, _, kv_heads, block_size, dim = kv_cache.shape
        address = kv_cache.data_ptr() + layer * kv_cache.stride(1) * kv_cache.itemsize
        super().__init__(address, kv_cache.stride(0), kv_heads, block_size, dim)


def can_attend(kv_cache: torch.Tensor) -> bool:
    """Whether native attention reads this cache."""
    return (
        kv_cache.dtype == torch.bfloat16
        and kv_cache.device.type == "cpu"
        and kv_cache.shape[-1] in DIMS
        and library() is not None
    )


def decode_attention(
    query: torch.Tensor,  # [S, heads, dim], a row in one piece
    cache: LayerCache,
    tables: torch.Tensor,  # int64 [S, blocks]
    lens: torch.Tensor,  # int64 [S], with the query's own token
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one token a sequence over the blocks in place; only after `can_attend`."""
    loaded = library()
    assert loaded is not None
    sequences, heads, dim = query.shape
    if query.stride()[1:] != (dim, 1):
        query = query.contiguous()
    out = query.new_empty(query.shape)
    loaded.pdserve_decode_attention(
        ctypes.addressof(cache), query.data_ptr(), query.stride(0), tables.data_ptr(),
        tables.shape[1], lens.data_ptr(), out.data_ptr(), sequences, heads, window or 0, scale,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def chunk_attention(
    query: torch.Tensor,  # [T, heads, dim], a row in one piece
    cache: LayerCache,
    table: torch.Tensor,  # int64 [blocks]
    prefix: int,
    window: int | None,
    scale: float,
    out: torch.Tensor,  # [T, heads, dim], contiguous
) -> None:
    """Attention of a prompt chunk, whose keys and values are in the cache already, after `prefix`
    tokens; only after `can_attend`."""
    loaded = library()
    assert loaded is not None and out.is_contiguous()
    tokens, heads, dim = query.shape
    if query.stride()[1:] != (dim, 1):
        query = query.contiguous()
    loaded.pdserve_chunk_attention(
        ctypes.addressof(cache), query.data_ptr(), query.stride(0), table.data_ptr(),
        out.data_ptr(), tokens, prefix, heads, window or 0, scale, torch.get_num_threads(),
    )  # fmt: skip
