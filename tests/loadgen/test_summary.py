"""Exact numbers from given timelines."""

import importlib.util
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from loadgen.record import RequestRecord
from loadgen.runner import ClientLoad, RunResult
from loadgen.summary import Slo, distribution, percentile, summarize, warnings

# An independent client, beside a checkout if at all.
NEUTRAL = Path(__file__).parents[3] / "shared" / "tools" / "load.py"


def record(index=0, scheduled=0.0, sent=None, times=(), tokens=None, **more) -> RequestRecord:
    return RequestRecord(
        index,
        scheduled,
        scheduled if sent is None else sent,
        ended_s=times[-1] if times else scheduled,
        token_times_s=list(times),
        wanted_prompt_tokens=10,
        wanted_output_tokens=tokens or len(times),
        output_tokens=tokens,
        **more,
    )


def result(*records: RequestRecord, **load) -> RunResult:
    return RunResult(list(records), 10.0, ClientLoad(**load))


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 99.9, 100])
def test_percentiles_are_numpys(count, percent):
    values = list(np.random.default_rng(count).normal(size=count))
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_no_values_have_no_percentiles():
    assert math.isnan(percentile([], 50))
    assert distribution([])["p99"] is None
    assert distribution([])["count"] == 0


def test_one_request_by_hand():
    # Due at 1.0, sent at 1.2, tokens at 2.0, 2.5, 3.5; the last chunk carries two.
    r = record(scheduled=1.0, sent=1.2, times=(2.0, 2.5, 3.5), tokens=4)
    assert r.ttft_s == pytest.approx(0.8)
    assert r.ttft_scheduled_s == pytest.approx(1.0)
    assert r.gaps_s == pytest.approx([0.5, 1.0])
    assert r.e2e_s == pytest.approx(2.3)
    assert r.tpot_s == pytest.approx(1.5 / 3)
    assert r.send_delay_s == pytest.approx(0.2)


def test_a_single_token_has_no_tpot():
    assert record(times=(1.0,)).tpot_s is None


def test_throughput_counts_from_the_first_sending_to_the_last_token():
    summary = summarize(
        result(record(0, 1.0, times=(2.0, 3.0)), record(1, 2.0, times=(4.0, 5.0, 6.0)))
    )
    assert summary["duration_s"] == pytest.approx(5.0)
    assert summary["requests_per_s"] == pytest.approx(2 / 5)
    assert summary["output_tokens_per_s"] == pytest.approx(5 / 5)
    assert summary["total_tokens_per_s"] == pytest.approx(25 / 5)
    assert summary["itl_s"]["count"] == 3


def test_errors_are_counted_by_kind_and_measure_nothing():
    summary = summarize(
        result(
            record(0, times=(1.0, 2.0)),
            record(1, times=(100.0,), error="cut off"),
            record(2, error="HTTP 429"),
            record(3, error="HTTP 429"),
            record(4, times=(50.0,), is_interrupted=True),
        )
    )
    assert summary["requests"] == {
        "sent": 5, "ok": 1, "failed": 3, "interrupted": 1,
        "errors": {"cut off": 1, "HTTP 429": 2},
    }  # fmt: skip
    assert summary["ttft_s"]["max"] == 1.0
    assert summary["output_tokens"] == 2


def test_goodput_counts_requests_that_meet_both_limits():
    fast = record(0, times=(0.1, 0.2, 0.3))
    late_start = record(1, times=(0.9, 1.0, 1.1))
    slow_stream = record(2, times=(0.1, 1.0, 2.0))
    single = record(3, times=(0.1,))
    failed = record(4, error="timeout")
    run = result(fast, late_start, slow_stream, single, failed)
    both = summarize(run, Slo(ttft_s=0.5, tpot_s=0.2))
    assert both["goodput_per_s"] == pytest.approx(2 / 2.0)
    assert both["slo_attainment"] == pytest.approx(2 / 5)  # a failure is a miss
    assert summarize(run, Slo(ttft_s=0.5))["slo_attainment"] == pytest.approx(3 / 5)
    assert summarize(run)["goodput_per_s"] is None


def test_waiting_in_the_client_is_not_forgiven():
    held_back = record(0, scheduled=0.0, sent=3.0, times=(3.1, 3.2))
    assert not Slo(ttft_s=1.0).is_met_by(held_back)
    summary = summarize(result(held_back))
    assert summary["ttft_s"]["max"] == pytest.approx(0.1)
    assert summary["ttft_scheduled_s"]["max"] == pytest.approx(3.1)


def test_no_success_is_a_summary_too():
    summary = summarize(result(record(0, error="connect")), Slo(ttft_s=1))
    assert summary["requests"]["ok"] == 0
    assert summary["ttft_s"]["p50"] is None
    assert summary["goodput_per_s"] == 0


def test_a_busy_client_is_warned_of():
    calm = summarize(result(record(times=(1.0, 2.0)), cpu_share=0.3, lags_s=[0.001] * 50))
    assert not [w for w in warnings(calm) if "client" in w]
    busy = summarize(result(record(times=(1.0, 2.0)), cpu_share=0.95, lags_s=[0.2] * 50))
    said = " ".join(warnings(busy))
    assert "95% of a core" in said and "200 ms late" in said
    held_back = summarize(result(record(0, scheduled=0.0, sent=3.0, times=(3.1, 3.2))))
    assert any("3000 ms after their time" in w for w in warnings(held_back))


def test_lengths_that_differ_are_warned_of():
    right = record(0, times=(1.0, 2.0))
    short = record(1, times=(1.0, 2.0), tokens=2)
    short.wanted_output_tokens = 9
    short.prompt_tokens = 11
    said = " ".join(warnings(summarize(result(right, short))))
    assert "1 of 2 prompts" in said and "1 of 2 answers" in said


@pytest.mark.skipif(not NEUTRAL.is_file(), reason="no ../shared/tools/load.py beside this checkout")
def test_the_neutral_client_defines_every_number_alike(monkeypatch):
    neutral = load_neutral(monkeypatch)
    rng = np.random.default_rng(0)
    records, theirs = [], []
    for i in range(200):
        sent = float(rng.uniform(0, 5))
        times = sent + np.cumsum(rng.exponential(0.05, int(rng.integers(2, 40))))
        records.append(record(i, sent, times=tuple(map(float, times)), tokens=len(times)))
        other = neutral.R()
        other.t0, other.ts, other.n_out, other.n_in = sent, list(map(float, times)), len(times), 10
        theirs.append(other)
    ours = summarize(result(*records))
    start = min(r.sent_s for r in records)
    expected = neutral.summarize(theirs, 10, 2, start, cpu=0.0)
    for key, value in {
        "ttft_p50_ms": ours["ttft_s"]["p50"] * 1e3,
        "ttft_p99_ms": ours["ttft_s"]["p99"] * 1e3,
        "tpot_mean_ms": ours["tpot_s"]["mean"] * 1e3,
        "itl_p50_ms": ours["itl_s"]["p50"] * 1e3,
        "itl_p99_ms": ours["itl_s"]["p99"] * 1e3,
        "itl_p999_ms": ours["itl_s"]["p99.9"] * 1e3,
        "itl_max_ms": ours["itl_s"]["max"] * 1e3,
        "out_tok_s": ours["output_tokens_per_s"],
        "total_tok_s": ours["total_tokens_per_s"],
        "dur_s": ours["duration_s"],
    }.items():
        assert value == pytest.approx(expected[key], rel=1e-9), key


def load_neutral(monkeypatch):
    """Its definitions alone are used, so its HTTP library may be absent."""
    monkeypatch.setenv("BENCH_TOKENIZER", "none")
    if importlib.util.find_spec("aiohttp") is None:
        monkeypatch.setitem(sys.modules, "aiohttp", types.ModuleType("aiohttp"))
    spec = importlib.util.spec_from_file_location("neutral_load", NEUTRAL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
