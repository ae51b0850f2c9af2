import pytest

from core.block_hash import block_hashes
from core.errors import EngineError
from core.types import KVBlockCounts
from engine.block_pool import BlockPool, Owner

RUNNING, HELD, AWAITING = Owner


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Allocates and registers the full blocks (of 2 tokens) of a sequence."""
    hashes = block_hashes(tokens, 2, salt)
    blocks = pool.allocate(len(hashes), RUNNING)
    for block_id, value in zip(blocks, hashes, strict=True):
        pool.register(block_id, value)
    return blocks


def test_hands_out_blocks_in_order_and_reuses_the_last_freed_first():
    pool = BlockPool(6)
    assert pool.allocate(4, RUNNING) == [0, 1, 2, 3]
    pool.free([1, 2], RUNNING)
    assert pool.allocate(3, RUNNING) == [1, 2, 4]
    pool.check({RUNNING: [[0, 3], [1, 2, 4]]})


def test_blocks_without_a_hash_are_reused_before_cached_ones():
    pool = BlockPool(4)
    cached = fill(pool, [1, 2, 3, 4])  # 0, 1
    plain = pool.allocate(1, RUNNING)  # 2
    pool.free(cached, RUNNING)
    pool.free(plain, RUNNING)
    assert pool.counts() == KVBlockCounts(total=4, free=2, cached=2)
    assert pool.allocate(2, RUNNING) == [2, 3]
    assert pool.find(block_hashes([1, 2, 3, 4], 2)) == [0, 1]


def test_tails_are_evicted_before_their_prefixes_and_the_least_recently_used_first():
    pool = BlockPool(5)
    old = fill(pool, [1, 2, 3, 4, 5, 6])  # 0, 1, 2
    new = fill(pool, [7, 8, 9, 10])  # 3, 4
    pool.free(old, RUNNING)
    pool.free(new, RUNNING)
    assert pool.allocate(1, RUNNING) == [2]
    assert pool.find(block_hashes([1, 2, 3, 4, 5, 6], 2)) == [0, 1]
    assert pool.allocate(3, RUNNING) == [1, 0, 4]
    assert pool.find(block_hashes([1, 2, 3, 4, 5, 6], 2)) == []
    assert pool.find(block_hashes([7, 8, 9, 10], 2)) == [3]


def test_a_hit_moves_a_block_to_the_young_end():
    pool = BlockPool(2)
    first, second = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.free(first, RUNNING)
    pool.free(second, RUNNING)
    pool.share(first, RUNNING)
    assert pool.num_free == 1
    pool.free(first, RUNNING)
    assert pool.allocate(2, RUNNING) == [second[0], first[0]]


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2)
    blocks = fill(pool, [1, 2])
    pool.share(blocks, RUNNING)
    assert pool.ref_count(0) == 2
    pool.free(blocks, RUNNING)
    assert pool.num_free == 1
    pool.check({RUNNING: [[0]]})
    pool.free(blocks, RUNNING)
    assert pool.num_free == 2
    assert pool.ref_count(0) == 0


def test_a_hit_is_a_prefix_of_the_chain_and_salts_share_nothing():
    pool = BlockPool(8)
    fill(pool, [1, 2, 3, 4])
    assert pool.find(block_hashes([1, 2, 3, 4, 5, 6], 2)) == [0, 1]
    assert pool.find(block_hashes([1, 2, 9, 9, 3, 4], 2)) == [0]
    assert pool.find(block_hashes([3, 4], 2)) == []
    assert pool.find(block_hashes([1, 2, 3, 4], 2, "salt")) == []


def test_a_second_copy_of_the_same_content_stays_without_a_hash():
    pool = BlockPool(4)
    first, copy = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert pool.find(block_hashes([1, 2], 2)) == first
    pool.free(copy, RUNNING)
    assert pool.counts() == KVBlockCounts(total=4, free=3, running=1)
    pool.check({RUNNING: [first]})


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(2, enable_prefix_caching=False)
    pool.free(fill(pool, [1, 2]), RUNNING)
    assert pool.find(block_hashes([1, 2], 2)) == []
    assert pool.counts() == KVBlockCounts(total=2, free=2)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    pool.allocate(2, RUNNING)
    with pytest.raises(EngineError, match="2 blocks wanted, 1 are free"):
        pool.allocate(2, RUNNING)
    assert pool.allocate(1, RUNNING) == [2]


def test_a_block_is_not_freed_twice_nor_by_somebody_else():
    pool = BlockPool(2)
    blocks = pool.allocate(1, HELD)
    with pytest.raises(EngineError, match="not RUNNING"):
        pool.free(blocks, RUNNING)
    pool.free(blocks, HELD)
    with pytest.raises(EngineError, match="not HELD"):
        pool.free(blocks, HELD)
    pool.check({})


def test_counts_by_owner_add_up_and_running_comes_first():
    pool = BlockPool(8)
    shared = fill(pool, [1, 2])
    pool.share(shared, HELD)
    pool.share(shared, AWAITING)
    pool.allocate(2, HELD)
    pool.allocate(1, AWAITING)
    expected = KVBlockCounts(total=8, free=4, running=1, held=2, awaiting=1)
    assert pool.counts() == expected
    pool.free(shared, RUNNING)
    assert pool.counts() == KVBlockCounts(total=8, free=4, held=3, awaiting=1)
    pool.free(shared, HELD)
    assert pool.counts() == KVBlockCounts(total=8, free=4, held=2, awaiting=2)
    pool.move(shared, AWAITING, RUNNING)
    assert pool.counts() == expected
    pool.check({RUNNING: [shared], HELD: [[1, 2]], AWAITING: [[3]]})


def test_a_block_that_was_found_or_is_shared_is_not_writable():
    pool = BlockPool(3)
    (cached,), (own,) = fill(pool, [1, 2]), pool.allocate(1, RUNNING)
    assert not pool.is_writable(cached)
    assert pool.is_writable(own)
    pool.share([own], AWAITING)
    assert not pool.is_writable(own)


def test_free_blocks_that_a_hit_would_take_are_not_counted():
    pool = BlockPool(4)
    blocks = fill(pool, [1, 2, 3, 4])
    pool.free(blocks[1:], RUNNING)
    assert pool.num_free == 3
    assert pool.num_free_without(blocks) == 2


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({RUNNING: [[0, 1], [1]]}, "block 1 has 1 RUNNING references, tables have 2"),
        ({RUNNING: [[0]]}, "block 1 has 1 RUNNING references, tables have 0"),
        ({RUNNING: [[0]], HELD: [[1]]}, "block 1 has 1 RUNNING references, tables have 0"),
    ],
)
def test_the_check_names_the_block_whose_books_are_wrong(tables, message):
    pool = BlockPool(3)
    pool.allocate(2, RUNNING)
    with pytest.raises(EngineError, match=message):
        pool.check(tables)
