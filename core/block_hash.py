"""Chained hashes of full KV blocks: the same in every process, so that the router, P and D agree.

A block's hash covers everything that its content depends on: the salt, all tokens before it
(through the parent's hash) and its own tokens. Fields are typed and length-prefixed, so that no
two different inputs share an encoding. The digest is SHA-256, whole: a collision would hand one
user's KV to another.
"""

import hashlib
import struct
from collections.abc import Sequence

_VERSION = b"pdserve-block-v1"


def root_hash(block_size: int, cache_salt: str = "") -> bytes:
    """Parent of a sequence's first block. Different salts share nothing."""
    salt = cache_salt.encode()
    return hashlib.sha256(_VERSION + struct.pack("<II", block_size, len(salt)) + salt).digest()


def following_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which come after `parent`, first to last."""
    num_tokens = len(token_ids) // block_size * block_size
    # In one go: this is done for every prompt on its way, by router and worker.
    packed = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    size = 4 * block_size
    hashes = []
    for start in range(0, len(packed), size):
        parent = hashlib.sha256(parent + packed[start : start + size]).digest()
        hashes.append(parent)
    return hashes


def block_hashes(
    token_ids: Sequence[int], block_size: int, cache_salt: str = "", limit: int | None = None
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, first to last, at most `limit` of them."""
    if limit is not None:
        token_ids = token_ids[: limit * block_size]
    return following_hashes(root_hash(block_size, cache_salt), token_ids, block_size)


def token_digest(token_ids: Sequence[int]) -> bytes:
    """Digest of a whole token sequence: binds a hand-over to the tokens that it is for."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def short_hash(value: bytes) -> int:
    """The first 64 bits of a block's hash: its name where a mistake costs time alone, as in what
    a router knows of the workers' caches."""
    return int.from_bytes(value[:8], "little")
