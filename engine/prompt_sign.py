"""By which processes of one host tell each other that one of them is reading a prompt.

Idle threads of the reader (`native/hands.h`) have what others leave of the host's cores; whoever
decodes may leave some (`engine.loop`).
"""

import fcntl
import functools
import logging
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# Linux's struct flock: type, whence, start, length (0: to the end), pid.
_FLOCK = struct.Struct("@hhlli")
_SHARED = fcntl.LOCK_SH | fcntl.LOCK_NB
_QUESTION = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class PromptSign:
    """A lock on a file that any number may share. Nobody ever asks for it alone, they only ask
    whether they could have it, so that nobody waits; who ends in the middle has let go of it.

    One instance of a path in a process: closing a file gives up all of a process's locks on it.
    Where the file cannot be had or locked, and on other systems than Linux, which alone have such
    threads, no sign is ever seen.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        if sys.platform != "linux":
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
            fcntl.lockf(self._file, _SHARED)  # some file systems have no locks
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        except OSError as error:
            self.close()
            logger.warning("prompts of other processes are not minded: %s", error)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """For one thread of the process at a time."""
        if self._file is None:
            yield
            return
        with suppress(OSError):  # a stranger has it alone
            fcntl.lockf(self._file, _SHARED)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def is_raised(self) -> bool:
        """By another process."""
        if self._file is None:
            return False
        answer = fcntl.fcntl(self._file, fcntl.F_GETLK, _QUESTION)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@functools.cache
def host_sign() -> PromptSign:
    """Of this user's processes on this host."""
    return PromptSign(Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}.prompts")
