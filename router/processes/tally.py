"""How many requests the router processes of one deployment have, so that limits hold over all."""

import mmap
import os
import struct

from router.processes.share import MAX_PROCESSES, Share

_COUNT = struct.Struct("=I")


class Tally:
    """One number of this process, and what the others have of it: nothing, where it is alone."""

    def set(self, value: int) -> None:
        pass

    def elsewhere(self) -> int:
        return 0


class TallyFile:
    """In memory: a row for each kind, a count for each process, which writes its own and nobody
    else's, so that there is nothing to lock. Two processes that look in the same moment may both
    take the last place. What a killed process had counts until it is started again."""

    def __init__(self, share: Share) -> None:
        """Takes over this process's number: what an earlier process of it had is gone."""
        self.share = share
        size = 2 * MAX_PROCESSES * _COUNT.size
        self._fd = os.open(share.folder / "tally", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, size)
        self.data = mmap.mmap(self._fd, size)
        self.in_flight = _SharedTally(self, 0)
        self.queued = _SharedTally(self, 1)

    def close(self) -> None:
        self.data.close()
        os.close(self._fd)


class _SharedTally(Tally):
    def __init__(self, file: TallyFile, row: int) -> None:
        self._file = file
        self._row = row * MAX_PROCESSES * _COUNT.size
        self.set(0)

    def set(self, value: int) -> None:
        own = self._row + self._file.share.index * _COUNT.size
        _COUNT.pack_into(self._file.data, own, value)

    def elsewhere(self) -> int:
        row = self._file.data[self._row : self._row + self._file.share.count * _COUNT.size]
        counts = [count for (count,) in _COUNT.iter_unpack(row)]
        return sum(counts) - counts[self._file.share.index]
