"""Reading traces, and the hit rates that are known of the real ones."""

import gzip
from pathlib import Path

import pytest

from benchmarks.planner_published import hit_rate
from core.errors import ConfigError
from planner.trace import Trace, TraceRequest, load_trace, sampled

SHARED = Path(__file__).parents[3] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the public traces are not beside the repository"
)


def test_azure_csv_gzipped_and_without_a_last_newline(tmp_path):
    path = tmp_path / "azure.csv.gz"
    lines = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n"
        "2023-11-17 00:00:02.2500009,396,109"
    )
    path.write_bytes(gzip.compress(lines.encode()))
    first, second = load_trace(path).requests
    assert (first.arrival, first.num_prompt, first.num_output) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(2.75)


def test_mooncake_jsonl(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
        '{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [0]}\n'
    )
    trace = load_trace(path)
    assert trace.hash_block == 512 and trace.rate == pytest.approx(1.0)
    first, second = trace.requests
    assert first.hashes[0] == second.hashes[0] != first.hashes[1]


def test_lengths_need_a_rate_and_arrive_at_random(tmp_path):
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{n},5,{n + 5},1\n" for n in range(1, 2001))
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + rows)
    with pytest.raises(ConfigError, match="give a rate"):
        load_trace(path)
    trace = load_trace(path, rate=4.0, seed=1)
    assert trace.rate == pytest.approx(4.0, rel=0.1)
    assert trace == load_trace(path, rate=4.0, seed=1) != load_trace(path, rate=4.0, seed=2)


def test_rate_and_laps():
    trace = Trace(tuple(TraceRequest(float(i), 10, 1, (b"a",)) for i in range(5)), hash_block=16)
    assert trace.at_rate(4.0).rate == pytest.approx(4.0)
    laps = trace.repeated(12)
    arrivals = [r.arrival for r in laps.requests]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 12
    # A second lap does not find the first one's prefixes.
    assert len({r.hashes for r in laps.requests}) == 3
    assert sampled(trace.requests, 50, 2.0, seed=1) == sampled(trace.requests, 50, 2.0, seed=1)


@needs_traces
@pytest.mark.parametrize(
    ("name", "num_blocks", "published"),
    [
        ("conversation", 1_000, 0.045),
        ("conversation", 10_000, 0.21),
        ("conversation", 30_000, 0.33),
        ("conversation", 50_000, 0.35),
        ("conversation", 400_000, 0.366),
        ("synthetic", 400_000, 0.640),
    ],
)
def test_the_block_pool_has_the_known_hit_rates_of_mooncakes_traces(name, num_blocks, published):
    trace = load_trace(SHARED / f"mooncake_{name}.jsonl.gz")
    assert hit_rate(trace, num_blocks) == pytest.approx(published, abs=0.006)
