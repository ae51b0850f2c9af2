"""Keeping what a load takes at its peak close to what it leaves behind, on Linux."""

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_SMALL, _LARGE = 128 << 10, 32 << 20

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
