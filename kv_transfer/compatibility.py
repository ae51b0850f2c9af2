"""What two workers must have in common before KV may pass between them."""

from collections.abc import Mapping

from core.errors import IncompatiblePeerError
from core.kv_compatibility import differences
from kv_transfer.layout import KVShape

# Grows when the meaning of a KV block, of the commit record or of the hand-over changes.
PROTOCOL_VERSION = "2"


def describe(shape: KVShape, **more: str) -> dict[str, str]:
    """The compatibility map of a worker: protocol, shape of its KV, and `more`: what else its
    meaning depends on (model fingerprint, dtypes, rope)."""
    return {"protocol": PROTOCOL_VERSION, **more, **shape.fields()}


def check(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises IncompatiblePeerError naming every field that keeps KV from passing, with both
    values. A field that only one side has is one."""
    differing = [
        f"{name} (ours {ours.get(name, 'unset')}, theirs {theirs.get(name, 'unset')})"
        for name in differences(ours, theirs)
    ]
    if differing:
        raise IncompatiblePeerError("workers differ in " + ", ".join(differing))
