"""Learns from UCX's own log which transport it uses.

NIXL does not tell what moves the bytes, but UCX logs the protocol that it selects for each kind
of endpoint (`UCX_PROTO_INFO`). Here that log goes to an anonymous memory file instead of the
terminal, is read after a connect, and its warnings and errors are passed on to Python's logging.

UCX reads its settings once, when its library is loaded, so `environment()` must enclose the
first import of NIXL in a process. A user who sets one of the variables keeps what they set, and
the carrier is then unknown.
"""

import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_VARIABLES = ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO")
_TITLE = re.compile(r"\| .*\b(intra-node|inter-node) cfg#\d+")
_READ = re.compile(r"\| remote memory read by ucp_get")
_LAST_RANGE = re.compile(r"\|\s*\d+\.\.inf\s*\|[^|]*\|\s*([^|]+?)\s*\|")
_TRANSPORT = re.compile(r"([a-z]\w*)/[\w.:-]+")


class UcxLog:
    """The log of the process's one UCX library. Used by one thread at a time.

    `carriers` maps "intra-node" and "inter-node" to the transport that reads from such peers,
    as of the last endpoint configuration of that kind that UCX logged."""

    def __init__(self) -> None:
        self.carriers: dict[str, str] = {}
        self._fd = -1
        self._offset = 0
        self._flush = lambda: None
        self._scope = ""
        self._is_read_table = False

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Sets the variables that UCX reads while it loads, and takes them away again: a child
        process must not inherit a log file that means another file there. Only the first use in
        a process has an effect."""
        if (
            self._fd >= 0
            or any(name in os.environ for name in _VARIABLES)
            or not hasattr(os, "memfd_create")
        ):
            yield
            return
        self._fd = os.memfd_create("ucx-log", os.MFD_CLOEXEC)
        values = ("info", f"/proc/self/fd/{self._fd}", "y")
        os.environ.update(zip(_VARIABLES, values, strict=True))
        try:
            yield
        finally:
            for name in _VARIABLES:
                os.environ.pop(name, None)
        self._flush = _flush_function()

    def read(self) -> None:
        """Takes in what UCX logged since the last call."""
        if self._fd < 0:
            return
        self._flush()
        size = os.fstat(self._fd).st_size
        text = os.pread(self._fd, size - self._offset, self._offset)
        self._offset += len(text)
        for line in text.decode(errors="replace").splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        if " UCX  WARN" in line or " UCX  ERROR" in line:
            # A peer's death is logged as an error; the pull that it failed says so already.
            logger.info("UCX: %s", line.split(" UCX  ", 1)[1].strip())
        elif title := _TITLE.search(line):
            self._scope = title[1]
            self._is_read_table = False
        elif "cfg#" in line:
            self._scope = ""
        elif _READ.search(line):
            self._is_read_table = True
        elif self._scope and self._is_read_table and (row := _LAST_RANGE.search(line)):
            names = dict.fromkeys(_TRANSPORT.findall(row[1]))
            self.carriers[self._scope] = "+".join(names) or row[1]
            self._is_read_table = False


def _flush_function():
    """UCX buffers its log file; its own flush is found through the loaded library."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if re.search(r"/libucs[-.][^/]*$", line)}
    for path in sorted(paths):
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL(path).ucs_log_flush
    return lambda: None
