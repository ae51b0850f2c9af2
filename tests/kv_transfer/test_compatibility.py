import pytest
import torch

from core.errors import IncompatiblePeerError
from kv_transfer.compatibility import PROTOCOL_VERSION, check, describe_cache

CACHE = torch.zeros(7, 2, 2, 3, 16, 8, dtype=torch.bfloat16)
OURS = describe_cache(CACHE, 16, model="m1", rope="theta=10000")


def test_what_is_described():
    assert OURS == {
        "protocol": PROTOCOL_VERSION,
        "kv_dtype": "bfloat16",
        "block_shape": "2x2x3x16x8",
        "block_size": "16",
        "model": "m1",
        "rope": "theta=10000",
    }


def test_the_number_of_blocks_may_differ():
    check(OURS, describe_cache(CACHE[:3], 16, model="m1", rope="theta=10000"))


@pytest.mark.parametrize("field", sorted(OURS))
def test_every_field_counts(field):
    for theirs in ({**OURS, field: "other"}, {k: v for k, v in OURS.items() if k != field}):
        with pytest.raises(IncompatiblePeerError) as refused:
            check(OURS, theirs)
        value = theirs.get(field, "unset")
        assert f"{field} (ours {OURS[field]}, theirs {value})" in refused.value.message
        with pytest.raises(IncompatiblePeerError, match=field):
            check(theirs, OURS)


def test_all_differences_are_named():
    with pytest.raises(IncompatiblePeerError) as refused:
        check(OURS, {**OURS, "model": "m2", "block_size": "32"})
    assert refused.value.message == (
        "workers differ in block_size (ours 16, theirs 32), model (ours m1, theirs m2)"
    )
