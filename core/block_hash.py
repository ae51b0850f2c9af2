"""Chained hashes of full KV blocks: the same in every process, so that the router, P and D agree.

A block's hash covers everything that its content depends on: the salt, all tokens before it
(through the parent's hash) and its own tokens. Fields are typed and length-prefixed, so that no
two different inputs share an encoding. The digest is SHA-256, whole: a collision would hand one
user's KV to another.
"""

import hashlib
import struct
from collections.abc import Sequence
from itertools import islice

_VERSION = b"pdserve-block-v1"


def root_hash(block_size: int, cache_salt: str = "") -> bytes:
    """Parent of a sequence's first block. Different salts share nothing."""
    salt = cache_salt.encode()
    return hashlib.sha256(_VERSION + struct.pack("<II", block_size, len(salt)) + salt).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block after `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, cache_salt: str = "", limit: int | None = None
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, first to last, at most `limit` of them."""
    parent = root_hash(block_size, cache_salt)
    hashes = []
    starts = range(0, len(token_ids) - block_size + 1, block_size)
    for start in islice(starts, limit):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def token_digest(token_ids: Sequence[int]) -> bytes:
    """Digest of a whole token sequence: binds a hand-over to the tokens that it is for."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def short_hash(value: bytes) -> int:
    """The first 64 bits of a block's hash: its name where a mistake costs time alone, as in what
    a router knows of the workers' caches."""
    return int.from_bytes(value[:8], "little")
