import pytest
import torch
import xxhash

from core.errors import CorruptBlockError
from kv_transfer.checksum import block_checksums, compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_checksums_are_xxh3_of_the_bytes_in_order(dtype):
    cache = (torch.randn(6, 2, 3, 5) * 50).to(dtype)
    raw = cache.view(torch.uint8).flatten(1).numpy()
    ids = [4, 0, 4, 5]
    assert block_checksums(cache, ids) == [
        xxhash.xxh3_64_intdigest(raw[block].tobytes()) for block in ids
    ]
    assert block_checksums(cache, []) == []


def test_compare_names_the_first_bad_position():
    cache = torch.randn(6, 8)
    expected = block_checksums(cache, [5, 3, 1])
    compare(block_checksums(cache, [5, 3, 1]), expected)
    cache.view(torch.uint8)[3, 9] ^= 1
    cache.view(torch.uint8)[1, 0] ^= 1
    with pytest.raises(CorruptBlockError, match="position 1 of 3"):
        compare(block_checksums(cache, [5, 3, 1]), expected)


def test_swapped_blocks_are_corrupt():
    cache = torch.randn(6, 8)
    with pytest.raises(CorruptBlockError, match="position 0"):
        compare(block_checksums(cache, [1, 0]), block_checksums(cache, [0, 1]))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_checksums_is_refused(count):
    cache = torch.zeros(4, 8)
    with pytest.raises(CorruptBlockError, match=f"{count} checksums for 2"):
        compare(block_checksums(cache, [0, 1]), block_checksums(cache, [0] * count))
