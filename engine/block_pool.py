"""Who owns which KV block, and which blocks hold KV that can be used again."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum

from core.errors import EngineError
from core.types import KVBlockCounts


class Owner(IntEnum):
    """On whose behalf a block is referenced. A block with several owners counts as the first."""

    RUNNING = 0
    HELD = 1
    AWAITING = 2


class BlockPool:
    """Hands out block ids and finds blocks by the hash of their content. Owns no memory.

    - `ref_count == 0` if and only if the block is in the free queue.
    - The free queue is two: blocks without a hash, handed out first (the one freed last leads),
      then cached blocks, least recently used first. A cached block is found by its hash until
      it is handed out again.
    - A table's blocks are freed in reverse, so that tails are evicted before their prefixes.
    - Only full blocks are registered; one block has one hash and one hash has one block. Later
      copies of the same content stay without a hash.
    - Every operation is O(1) for each block that it names.
    - `on_change`, if set, hears of every hash that can be found from now on (True) or no more
      (False), in order. It must neither block nor raise.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 leads
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [[0] * num_blocks for _ in Owner]
        self._num_owned = [0] * len(Owner)  # blocks that count as this owner's
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.on_change: Callable[[bytes, bool], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out, cached ones included."""
        return len(self._empty) + len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return sum(refs[block_id] for refs in self._refs)

    def counts(self) -> KVBlockCounts:
        running, held, awaiting = self._num_owned
        return KVBlockCounts(
            total=self.num_blocks,
            free=len(self._empty),
            cached=len(self._cached),
            running=running,
            held=held,
            awaiting=awaiting,
        )

    def find(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of the chain that is cached or in use. Changes nothing."""
        found = []
        for value in block_hashes:
            block_id = self._block_of.get(value)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_without(self, block_ids: Iterable[int]) -> int:
        """What `num_free` would be after these blocks were shared."""
        return self.num_free - sum(block_id in self._cached for block_id in block_ids)

    def share(self, block_ids: Iterable[int], owner: Owner) -> None:
        """References blocks that `find` returned; those in the free queue leave it."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._change(block_id, owner, 1)

    def allocate(self, num_blocks: int, owner: Owner) -> list[int]:
        """Takes blocks from the free queue; what a cached one held is forgotten. All or nothing:
        raises EngineError when there are too few."""
        if num_blocks > self.num_free:
            raise EngineError(f"block pool: {num_blocks} blocks wanted, {self.num_free} are free")
        taken = []
        for _ in range(num_blocks):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id, _none = self._cached.popitem(last=False)
                self._forget(block_id)
            self._refs[owner][block_id] = 1
            taken.append(block_id)
        self._num_owned[owner] += num_blocks
        return taken

    def free(self, block_ids: Sequence[int], owner: Owner) -> None:
        """Gives up one reference to each block of a table. Raises EngineError if the owner has
        none: a block freed twice would be handed to two sequences."""
        for block_id in reversed(block_ids):
            if not self._refs[owner][block_id]:
                raise EngineError(f"block pool: block {block_id} is not {owner.name} and was freed")
            self._change(block_id, owner, -1)
            if self.ref_count(block_id) == 0:
                if self._hash_of[block_id] is None:
                    self._empty.append(block_id)
                else:
                    self._cached[block_id] = None

    def move(self, block_ids: Iterable[int], source: Owner, target: Owner) -> None:
        """The references of one owner become another's; no block is freed in between."""
        for block_id in block_ids:
            self._change(block_id, target, 1)
            self._change(block_id, source, -1)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """A full block that is in use has its final content, which this hash names."""
        if not self.enable_prefix_caching or block_hash in self._block_of:
            return
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        if self.on_change is not None:
            self.on_change(block_hash, True)

    def is_writable(self, block_id: int) -> bool:
        """Whether exactly one owner has the block and nobody can find it."""
        return self.ref_count(block_id) == 1 and self._hash_of[block_id] is None

    def check(self, tables: Mapping[Owner, Sequence[Sequence[int]]]) -> None:
        """Raises EngineError unless the pool's books agree with the block tables in use."""
        for owner in Owner:
            refs = Counter(block_id for table in tables.get(owner, ()) for block_id in table)
            for block_id, count in enumerate(self._refs[owner]):
                _require(
                    count == refs[block_id],
                    f"block {block_id} has {count} {owner.name} references, tables have "
                    f"{refs[block_id]}",
                )
        free = [*self._empty, *self._cached]
        _require(len(free) == len(set(free)), "a block is twice in the free queue")
        unreferenced = {b for b in range(self.num_blocks) if self.ref_count(b) == 0}
        _require(set(free) == unreferenced, "free queue and unreferenced blocks differ")
        _require(all(self._hash_of[b] is None for b in self._empty), "an empty block has a hash")
        _require(all(self._hash_of[b] for b in self._cached), "a cached block has no hash")
        by_block = {b: value for b, value in enumerate(self._hash_of) if value is not None}
        by_hash = {block_id: value for value, block_id in self._block_of.items()}
        _require(by_block == by_hash, "hashes of blocks and blocks of hashes differ")
        _require(len(by_hash) == len(self._block_of), "a block has two hashes")
        owned = Counter(self._owner(b) for b in range(self.num_blocks))
        _require([owned[o] for o in Owner] == self._num_owned, "counts by owner are wrong")

    def _forget(self, block_id: int) -> None:
        value = self._hash_of[block_id]
        if value is not None:
            del self._block_of[value]
            self._hash_of[block_id] = None
            if self.on_change is not None:
                self.on_change(value, False)

    def _owner(self, block_id: int) -> Owner | None:
        for owner in Owner:
            if self._refs[owner][block_id]:
                return owner
        return None

    def _change(self, block_id: int, owner: Owner, delta: int) -> None:
        before = self._owner(block_id)
        self._refs[owner][block_id] += delta
        after = self._owner(block_id)
        if before is not after:
            if before is not None:
                self._num_owned[before] -= 1
            if after is not None:
                self._num_owned[after] += 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineError(f"block pool: {message}")
