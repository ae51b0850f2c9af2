"""The arithmetic of docs/roofline.md, from first principles and against the page."""

from pathlib import Path

import pytest

from planner.roofline import replicas, tables

PAGE = Path(__file__).parents[2] / "docs" / "roofline.md"
SMALL, _, LARGE, LARGE_H200 = replicas()


def test_the_page_has_the_tables_as_they_are_computed():
    page = PAGE.read_text()
    for name, table in tables().items():
        assert table in page, f"{name}: run python -m planner.roofline and put it into the page"


def test_kv_of_a_token():
    # Layers, key and value, KV heads, head dimension, two bytes.
    assert SMALL.shape.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2 == 131072
    assert LARGE.shape.kv_bytes_per_token == 80 * 2 * 8 * 128 * 2 == 327680


def test_prefill_is_two_operations_a_weight_and_causal_attention():
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head = 128256 * 4096
    pairs = 4096 * 4097 / 2
    exact = 2 * layers * 4096 + 2 * head + 32 * 4 * 4096 * pairs
    assert SMALL.prefill_flops(4096) == pytest.approx(exact, rel=0.005)  # 7.50e9 is rounded
    assert SMALL.prefill_seconds(4096) == pytest.approx(exact / 989e12, rel=0.005)
    assert LARGE.prefill_seconds(512) == LARGE.prefill_flops(512) / (4 * 989e12)


def test_decode_reads_weights_once_and_all_kv():
    assert SMALL.decode_bytes(64, 2048) == 2 * 7.5e9 + 64 * 2048 * 131072
    assert SMALL.decode_seconds(64, 2048) == pytest.approx(32.18e9 / 3.35e12, rel=1e-3)
    # Far beyond the balance, with hardly any KV, arithmetic decides.
    assert SMALL.balanced_batch == pytest.approx(989e12 / 3.35e12)
    assert SMALL.decode_seconds(4000, 1) == pytest.approx(2 * 7.5e9 * 4000 / 989e12)


def test_transfer_over_a_link_for_each_gpu():
    assert SMALL.transfer_seconds(4096, 400) == pytest.approx(4096 * 131072 / 50e9)
    assert LARGE.transfer_seconds(4096, 400) == pytest.approx(4096 * 327680 / 200e9)
    for replica in replicas():
        gigabit = replica.hiding_gigabit(4096)
        assert replica.transfer_seconds(4096, gigabit) == pytest.approx(
            replica.prefill_seconds(4096)
        )


def test_pools_balance():
    """As many requests a second leave prefill as decode finishes."""
    ratio = LARGE_H200.prefill_per_decode(4096, 256, 8)
    prefilled = ratio / LARGE_H200.prefill_seconds(4096)
    decoded = 8 / (256 * LARGE_H200.decode_seconds(8, 4096 + 128))
    assert prefilled == pytest.approx(decoded)
