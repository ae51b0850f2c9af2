"""Plans run as plain copies: every destination rank gets what the reference KV has, and nothing
but what was planned is written."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import IncompatiblePeerError
from kv_transfer.layout import CopyPlan, KVShape

NOTHING = 255


def blocks_of(shape: KVShape, num_tokens: int) -> int:
    return -(-num_tokens // shape.block_size)


@st.composite
def cases(draw):
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    degrees = [n for n in (1, 2, 3, 4, 8) if heads % n == 0 or n % heads == 0]
    num_layers = draw(st.integers(1, 4))
    size, ratio = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = draw(st.permutations([size, size * ratio]))
    windows = draw(
        st.one_of(
            st.just(()),
            st.tuples(*[st.one_of(st.none(), st.integers(1, 12))] * num_layers),
        )
    )
    source, destination = (
        KVShape(
            num_layers=num_layers,
            num_streams=draw(st.just(2)) if heads > 1 else draw(st.sampled_from([1, 2])),
            num_kv_heads=heads,
            row_bytes=1 + draw(st.shared(st.integers(0, 2), key="row")),
            block_size=sizes[side],
            tensor_parallel_size=draw(st.sampled_from(degrees)),
            sliding_windows=windows,
        )
        for side in (0, 1)
    )
    if source.num_streams != destination.num_streams:
        destination = KVShape(**{**_dict(destination), "num_streams": source.num_streams})
    num_tokens = draw(st.integers(1, 30))
    num_held = draw(st.integers(0, num_tokens // destination.block_size))
    cuts = sorted(draw(st.lists(st.integers(0, blocks_of(source, num_tokens)), max_size=3)))
    return source, destination, num_tokens, num_held, cuts


def _dict(shape: KVShape) -> dict:
    return {name: getattr(shape, name) for name in shape.__slots__}


def scattered(shape: KVShape, reference: np.ndarray, ids: list[int], pool: int) -> list[np.ndarray]:
    """The ranks' caches `[pool, layers, streams, heads, block, row]` with `reference`
    `[layers, streams, all heads, tokens, row]` in the blocks `ids`."""
    caches = []
    tokens = reference.shape[3]
    for rank in range(shape.tensor_parallel_size):
        heads = shape.heads_of(rank)
        cache = np.full(
            (pool, shape.num_layers, shape.num_streams, len(heads), shape.block_size,
             shape.row_bytes), NOTHING, dtype=np.uint8,
        )  # fmt: skip
        for position, block in enumerate(ids):
            start = position * shape.block_size
            stop = min(start + shape.block_size, tokens)
            cache[block, :, :, :, : stop - start] = reference[:, :, heads, start:stop]
        assert cache[0].nbytes == shape.block_bytes
        caches.append(cache)
    return caches


@settings(max_examples=300, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_every_rank_gets_what_it_needs_and_nothing_else_is_written(case, rng):
    source, destination, num_tokens, num_held, cuts = case
    reference = np.random.default_rng(rng.randrange(1 << 30)).integers(
        0, 200,
        (source.num_layers, source.num_streams, source.num_kv_heads, num_tokens, source.row_bytes),
        dtype=np.uint8,
    )  # fmt: skip
    pool = 40
    ids = rng.sample(range(pool), blocks_of(source, num_tokens))
    local = rng.sample(range(pool), blocks_of(destination, num_tokens))
    givers = [c.reshape(pool, -1) for c in scattered(source, reference, ids, pool)]
    first_token = num_held * destination.block_size
    for rank in range(destination.tensor_parallel_size):
        plan = CopyPlan(source, destination, rank, num_tokens)
        target = np.full((pool, destination.block_bytes), NOTHING, dtype=np.uint8)
        edges = [0, *cuts, len(ids)]
        copies = [
            copy
            for start, stop in zip(edges, edges[1:], strict=False)
            for copy in plan.copies(start, stop, first_token)
        ]
        # Pulled in ranges or at once: the same copies in the same order, the held ones in front.
        whole = plan.copies(0, len(ids))
        assert copies == whole[len(whole) - len(copies) :]
        written = np.zeros_like(target)
        for copy in copies:
            assert copy.num_bytes == sum(length for _, _, length in copy.pieces)
            for read, write, length in copy.pieces:
                piece = givers[copy.source_rank][ids[copy.source_position]][read : read + length]
                assert len(piece) == length
                target[local[copy.position], write : write + length] = piece
                written[local[copy.position], write : write + length] += 1
        assert written.max(initial=0) <= 1  # each byte once
        assert (target[written == 0] == NOTHING).all()
        check(plan, destination, reference, target, local, rank, num_tokens, num_held)


def check(plan, destination, reference, target, local, rank, num_tokens, num_held):
    heads = destination.heads_of(rank)
    shape = (-1, destination.num_layers, destination.num_streams, len(heads),
             destination.block_size, destination.row_bytes)  # fmt: skip
    cache = target.reshape(shape)
    windows = destination.sliding_windows or (None,) * destination.num_layers
    for token in range(num_tokens):
        position, offset = divmod(token, destination.block_size)
        got = cache[local[position], :, :, :, offset]
        if position < num_held:
            assert (got == NOTHING).all()
            continue
        for layer, window in enumerate(windows):
            is_seen = window is None or num_tokens - token < window
            if is_seen or position >= plan.first_whole_position:
                assert (got[layer] == reference[layer, :, heads, token].swapaxes(0, 1)).all()
    untouched = np.delete(cache, local, axis=0)
    assert (untouched == NOTHING).all()


def shape(**changes) -> KVShape:
    fields = {"num_layers": 2, "num_streams": 2, "num_kv_heads": 4, "row_bytes": 8,
              "block_size": 16, **changes}  # fmt: skip
    return KVShape(**fields)


def test_equal_shapes_are_one_piece_a_block():
    plan = CopyPlan(shape(), shape(), 0, 40)
    assert [(c.source_position, c.position, c.pieces) for c in plan.copies(0, 3)] == [
        (n, n, ((0, 0, shape().block_bytes),)) for n in range(3)
    ]


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 4), (4, 1), (4, 4)])
def test_a_head_slice_is_one_piece_for_each_layer_and_stream(ours, theirs):
    source, destination = (shape(tensor_parallel_size=n) for n in (ours, theirs))
    for rank in range(theirs):
        copies = CopyPlan(source, destination, rank, 16).copies(0, 1)
        assert {c.source_rank for c in copies} == {
            r for r in range(ours) if set(source.heads_of(r)) & set(destination.heads_of(rank))
        }
        assert {len(c.pieces) for c in copies} == ({1} if ours == theirs else {4})


def test_readers_of_a_replicated_latent_are_spread_over_the_ranks():
    latent = shape(num_streams=1, num_kv_heads=1, tensor_parallel_size=4)
    sources = [
        {c.source_rank for c in CopyPlan(latent, latent, rank, 16).copies(0, 1)}
        for rank in range(4)
    ]
    assert sources == [{0}, {1}, {2}, {3}]


def test_a_window_leaves_out_what_no_query_will_see():
    windowed = shape(sliding_windows=(16, None))
    plan = CopyPlan(windowed, windowed, 0, 64)
    half = windowed.block_bytes // 2
    # The next query is at 64 and sees 49..64 in layer 0.
    assert [c.num_bytes for c in plan.copies(0, 4)] == [half, half, half, 2 * half]
    assert plan.first_whole_position == 3
    only = shape(sliding_windows=(16, 16))
    assert [c.position for c in CopyPlan(only, only, 0, 64).copies(0, 4)] == [3]


def test_shapes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="3 KV heads cannot be divided"):
        shape(num_kv_heads=3, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        shape(sliding_windows=(4,))
    with pytest.raises(IncompatiblePeerError, match="block_size 24 is no multiple of 16"):
        CopyPlan(shape(), shape(block_size=24))
    with pytest.raises(IncompatiblePeerError, match="block_size"):
        shape().of_peer({"tensor_parallel_size": "2"})
    with pytest.raises(IncompatiblePeerError, match="cannot be divided"):
        shape().of_peer({"block_size": "16", "tensor_parallel_size": "3"})


def test_a_shape_survives_its_map():
    other = shape(block_size=32, tensor_parallel_size=2)
    assert shape().of_peer(other.fields()) == other
