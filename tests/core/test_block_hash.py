"""The hash chain that router, P and D must agree on."""

import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import block_hashes, following_hashes, root_hash, token_digest

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)
block_sizes = st.integers(1, 20)


def test_hashes_are_pinned():
    """A change of these values makes old and new processes miss each other's prefixes."""
    assert root_hash(16).hex()[:16] == "eb4a72cedc2ce1c1"
    assert [h.hex()[:16] for h in block_hashes(range(40), 16, "salt")] == [
        "4f52422fa51aa15b",
        "3efdab7f033bd4fa",
    ]
    assert token_digest([1, 2, 3]).hex()[:16] == "4636993d3e1da4e9"


def test_hashes_are_the_same_in_another_process():
    code = "from core.block_hash import block_hashes; print(block_hashes(range(48), 16)[-1].hex())"
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, timeout=60, check=True
    ).stdout
    assert output.decode().strip() == block_hashes(range(48), 16)[-1].hex()


@given(tokens, block_sizes)
def test_one_hash_for_each_full_block(ids, block_size):
    assert len(block_hashes(ids, block_size)) == len(ids) // block_size


@given(tokens, tokens, block_sizes)
def test_equal_hashes_mean_equal_prefixes(a, b, block_size):
    hashes_a, hashes_b = block_hashes(a, block_size), block_hashes(b, block_size)
    for i, (x, y) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])


@given(tokens, block_sizes, st.integers(0, 10))
def test_limit_takes_the_first(ids, block_size, limit):
    assert block_hashes(ids, block_size, limit=limit) == block_hashes(ids, block_size)[:limit]


@given(st.text(max_size=8), st.text(max_size=8))
def test_salts_share_nothing(a, b):
    hashes = [block_hashes(range(32), 16, salt) for salt in (a, b)]
    assert (set(hashes[0]) == set(hashes[1])) == (a == b)
    assert a == b or not set(hashes[0]) & set(hashes[1])


def test_block_size_is_part_of_the_hash():
    parents = root_hash(4), root_hash(2)
    one, other = (following_hashes(parent, [1, 2], 2) for parent in parents)
    assert one != other


def test_a_block_depends_on_all_before_it():
    first, second = block_hashes([1, 2, 3, 4], 2)
    assert following_hashes(first, [3, 4, 5], 2) == [second]
    assert block_hashes([9, 2, 3, 4], 2)[1] != second


def test_a_salt_cannot_be_mistaken_for_another_with_tokens():
    """Lengths are part of the encoding: a salt that ends like a token does not meet it."""
    assert root_hash(16, "a\x01\x00\x00\x00") not in following_hashes(root_hash(16, "a"), [1], 1)


@given(tokens, tokens)
def test_digest_tells_sequences_apart(a, b):
    assert (token_digest(a) == token_digest(b)) == (a == b)


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_ids_that_are_no_token_are_an_error(bad):
    with pytest.raises(struct.error):
        token_digest(bad)
