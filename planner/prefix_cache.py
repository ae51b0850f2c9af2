"""What the router believes to be in one worker's prefix cache."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Hashes of the blocks that one incarnation was asked to compute, least recently used first.

    Bounded by the worker's own number of blocks: it cannot hold more. A belief, never a promise:
    a wrong one costs time, not correctness.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks that are believed to be cached."""
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
