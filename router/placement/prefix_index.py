"""Which worker holds which KV blocks: one index for all workers, fed by their own events."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from core.errors import UnavailableError
from rpc import worker_pb2

# Of one worker, whatever it says of its own size: about 150 bytes each here.
MAX_BLOCKS = 1 << 20


class PrefixIndex:
    """From the name of a block (`core.block_hash.short_hash`) to its holders, as a set of bits.

    One walk along a prompt's blocks answers for every worker: a worker leaves at the first block
    that it does not hold. Owns nothing of a `Holdings` that was closed.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._slots: dict[int, Holdings] = {}  # by bit number
        self._free: list[int] = []

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def open(self, capacity: int) -> "Holdings":
        """For one incarnation of a worker with so many blocks. The caller closes it."""
        slot = self._free.pop() if self._free else len(self._slots)
        holdings = self._slots[slot] = Holdings(self, slot, capacity)
        return holdings

    def match(self, names: Sequence[int]) -> dict["Holdings", int]:
        """How many leading blocks each worker holds. Those that hold none are left out."""
        found: dict[Holdings, int] = {}
        alive, depth = -1, 0
        for name in names:
            now = alive & self._holders.get(name, 0)
            if now != alive:
                if depth:
                    self._note(alive & ~now, depth, found)
                alive = now
                if not alive:
                    return found
            depth += 1
        if depth:
            self._note(alive, depth, found)
        return found

    def _note(self, slots: int, depth: int, found: dict["Holdings", int]) -> None:
        while slots:
            lowest = slots & -slots
            found[self._slots[lowest.bit_length() - 1]] = depth
            slots ^= lowest

    def _set(self, name: int, bit: int) -> None:
        self._holders[name] = self._holders.get(name, 0) | bit

    def _clear(self, name: int, bit: int) -> None:
        left = self._holders[name] & ~bit
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]

    def _release(self, slot: int) -> None:
        del self._slots[slot]
        self._free.append(slot)


class Holdings:
    """The blocks of one incarnation.

    - `stored` are those that its events say it can find; they are forgotten with the stream that
      told of them, so that nothing outlives the truth.
    - A block that this router has sent a prompt for is expected, as long as the attempt lives and
      until the worker says that it is gone: prompts that begin alike and come at once meet on one
      worker, instead of each being computed on its own.
    """

    def __init__(self, index: PrefixIndex, slot: int, capacity: int) -> None:
        self._index = index
        self._slot = slot
        self._bit = 1 << slot
        self._capacity = min(capacity, MAX_BLOCKS)
        self._stored: set[int] = set()
        self._expected: dict[int, int] = {}  # how many attempts expect it
        self._is_open = True

    def __len__(self) -> int:
        """Blocks that the worker says it has."""
        return len(self._stored)

    def match(self, names: Sequence[int]) -> int:
        """Number of leading blocks that it holds."""
        for count, name in enumerate(names):
            if name not in self._stored and name not in self._expected:
                return count
        return len(names)

    def apply(self, event: worker_pb2.KvBlockEvents) -> None:
        """Raises UnavailableError if the worker claims more blocks than it can have: its word is
        then worth nothing, and everything heard from it is forgotten."""
        if not self._is_open:
            return
        if event.is_snapshot:
            self.forget()
        for name in event.removed:
            self._stored.discard(name)
            self._expected.pop(name, None)
            self._update(name)
        for name in event.stored:
            self._stored.add(name)
            self._index._set(name, self._bit)
        if len(self._stored) > self._capacity:
            self.forget()
            raise UnavailableError("it claims more KV blocks than it has")

    def forget(self) -> None:
        """The worker's events are not heard any more, or start again."""
        stored, self._stored = self._stored, set()
        for name in stored:
            self._update(name)

    @contextmanager
    def expecting(self, names: Sequence[int]) -> Iterator[None]:
        """The worker is asked to compute or fetch these blocks while the body runs."""
        if not self._is_open:
            yield
            return
        names = [name for name in names[: self._capacity] if name not in self._stored]
        for name in names:
            self._expected[name] = self._expected.get(name, 0) + 1
            self._index._set(name, self._bit)
        try:
            yield
        finally:
            for name in names:
                self._expect_less(name)

    def close(self) -> None:
        """The incarnation is gone. Idempotent."""
        if self._is_open:
            self._is_open = False
            names, self._expected = [*self._stored, *self._expected], {}
            self._stored = set()
            for name in set(names):
                self._index._clear(name, self._bit)
            self._index._release(self._slot)

    def _expect_less(self, name: int) -> None:
        count = self._expected.pop(name, 0) - 1
        if count > 0:
            self._expected[name] = count
        elif count == 0:
            self._update(name)

    def _update(self, name: int) -> None:
        """After it left `stored` or `expected`."""
        if name in self._stored or name in self._expected:
            return
        if self._index._holders.get(name, 0) & self._bit:
            self._index._clear(name, self._bit)
