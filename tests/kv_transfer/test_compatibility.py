import pytest

from core.errors import IncompatiblePeerError
from core.kv_compatibility import differences
from kv_transfer.compatibility import PROTOCOL_VERSION, check, describe
from kv_transfer.layout import KVShape

SHAPE = KVShape(num_layers=2, num_streams=2, num_kv_heads=4, row_bytes=16, block_size=16)
OURS = describe(SHAPE, kv_dtype="bfloat16", model="m1", rope="theta=10000")


def test_what_is_described():
    assert OURS == {
        "protocol": PROTOCOL_VERSION,
        "kv_dtype": "bfloat16",
        "num_layers": "2",
        "kv_streams": "2",
        "num_kv_heads": "4",
        "kv_row_bytes": "16",
        "block_size": "16",
        "tensor_parallel_size": "1",
        "model": "m1",
        "rope": "theta=10000",
    }


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
        check(OURS, {**OURS, "model": "m2", "block_size": "24"})
    assert refused.value.message == (
        "workers differ in block_size (ours 16, theirs 24), model (ours m1, theirs m2)"
    )


@pytest.mark.parametrize(
    ("field", "value", "is_bridged"),
    [
        ("block_size", "32", True),
        ("block_size", "4", True),
        ("block_size", "24", False),
        ("block_size", "0", False),
        ("block_size", "-16", False),
        ("tensor_parallel_size", "4", True),
        ("tensor_parallel_size", "0", False),
        ("num_kv_heads", "2", False),
    ],
)
def test_what_the_hand_over_bridges(field, value, is_bridged):
    theirs = {**OURS, field: value}
    expected = [] if is_bridged else [field]
    assert differences(OURS, theirs) == differences(theirs, OURS) == expected
