"""Memory of a host, on Linux: keeping what a load takes at its peak close to what it leaves behind,
and huge pages.

A decode step reads every weight and the KV of every sequence once. In pages of 4 KiB a step of one
sequence takes a fifth longer than in pages of 2 MiB: fetching ahead ends at each page, and KV lies
in pieces of some KiB. Where the kernel gives no huge pages, everything works in small ones.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_SMALL, _LARGE = 128 << 10, 32 << 20
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of madvise(2); the second since Linux 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def release_pages(address: int, num_bytes: int) -> None:
    """Mapped memory that was read and is not read again: its pages stop counting as resident. Only
    whole pages go, so that neighbours keep theirs; a file's are read again if need be."""
    start = -(-address // _PAGE) * _PAGE
    length = (address + num_bytes) // _PAGE * _PAGE - start
    if length > 0 and _libc.madvise(start, length, mmap.MADV_DONTNEED):
        logger.debug("madvise: %s", os.strerror(ctypes.get_errno()))


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Inside, tensors that are freed go back to the system. By itself the C library keeps more and
    more of what is freed for later, in pieces that nothing may ever fit into; a load that replaces
    every matrix would leave a quarter of its size behind. Afterwards it keeps up to 32 MB, which is
    what it comes to by itself: a step's tensors must not cost page faults."""
    if not hasattr(_libc, "mallopt"):  # another C library
        yield
        return
    _libc.mallopt(_M_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """As `torch.zeros`; on a CPU in huge pages."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    if memory.device.type == "cpu":
        start, length = _whole_pages(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        if length > 0:
            _libc.madvise(start, length, _MADV_HUGEPAGE)
    return memory.zero_()


def collapse_into_huge_pages() -> None:
    """Moves what this process has allocated by now, the weights above all, into huge pages: about
    2 seconds for each GB. What is allocated in many libraries cannot be asked for them before."""
    try:
        mappings = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for mapping in mappings:
        span, rights, *rest = mapping.split()
        if rights != "rw-p" or len(rest) > 3:  # a file's, the heap's or a stack
            continue
        first, _, last = span.partition("-")
        start, length = _whole_pages(int(first, 16), int(last, 16))
        if length > 0 and not _libc.madvise(start, length, _MADV_HUGEPAGE):
            _libc.madvise(start, length, _MADV_COLLAPSE)


def _whole_pages(start: int, end: int) -> tuple[int, int]:
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    return first, end // _HUGE_PAGE * _HUGE_PAGE - first
