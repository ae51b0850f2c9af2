"""The prefix cache of a simulated worker."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Hashes of the blocks that a worker has computed, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks that are cached."""
        for count, block in enumerate(hashes):
            if block not in self._hashes:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        # From the tail to the head, so that a tail is forgotten before the prefix it needs.
        for block in reversed(hashes[: self._capacity]):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)
