"""Lengths, arrivals and prompts: pure functions of options and seed."""

import statistics

import numpy as np
import pytest

from core.errors import ConfigError
from loadgen.length import parse_length
from loadgen.prompt import WORDS, TokenPrompts, WordPrompts, fit_words
from loadgen.record import Segment
from loadgen.trace import TraceEntry
from loadgen.workload import (
    Arrivals,
    Synthetic,
    arrival_times,
    prefix_share,
    synthetic_requests,
    trace_requests,
    with_arrivals,
)


def sample(text: str, count: int = 20_000) -> list[int]:
    return parse_length(text, "--input-len").sample(count, np.random.default_rng(7))


def synthetic(count: int = 50, **more) -> Synthetic:
    return Synthetic(count, parse_length("uniform:10:100", "x"), parse_length("8", "x"), **more)


# ---------------------------------------------------------------- lengths


def test_a_plain_number_is_that_length():
    assert sample("512", 3) == [512, 512, 512]


def test_uniform_includes_both_ends():
    values = sample("uniform:3:6")
    assert set(values) == {3, 4, 5, 6}


def test_normal_and_lognormal_have_the_asked_parameters():
    normal = sample("normal:500:50")
    assert statistics.mean(normal) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.05)
    lognormal = sample("lognormal:400:0.5")
    assert statistics.median(lognormal) == pytest.approx(400, rel=0.02)
    assert statistics.stdev(np.log(lognormal)) == pytest.approx(0.5, rel=0.03)


def test_no_length_is_below_one():
    assert min(sample("normal:2:50")) == 1


@pytest.mark.parametrize(
    "text",
    ["", "many", "0", "-5", "1.5", "normal:5", "normal:5:-1", "uniform:9:3", "zipf:1:2", "1:2",
     "normal:nan:1", "uniform:1.5:3"],
)  # fmt: skip
def test_a_wrong_length_is_an_error_that_names_the_option(text):
    with pytest.raises(ConfigError, match="--input-len"):
        parse_length(text, "--input-len")


# ---------------------------------------------------------------- arrivals


def test_arrivals_have_the_rate_and_begin_at_zero():
    times = arrival_times(20_000, rate=4.0, burstiness=1.0, seed=1)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness):
    gaps = np.diff(arrival_times(40_000, rate=10.0, burstiness=burstiness, seed=2))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(4, float("inf"), 1.0, 0) == [0.0] * 4


def test_the_seed_decides_arrivals_and_lengths_and_nothing_else_does():
    first, again = synthetic_requests(synthetic(), 3), synthetic_requests(synthetic(), 3)
    assert first == again
    other = synthetic_requests(synthetic(), 4)
    assert [r.num_prompt_tokens for r in other] != [r.num_prompt_tokens for r in first]
    assert arrival_times(9, 1, 1, 5) == arrival_times(9, 1, 1, 5) != arrival_times(9, 1, 1, 6)
    # At twice the rate the same requests come, in half the time.
    slow = with_arrivals(first, Arrivals(rate=1.0), 3)
    fast = with_arrivals(first, Arrivals(rate=2.0), 3)
    assert [r.prompt for r in slow] == [r.prompt for r in fast]
    assert [r.at_s for r in slow] == pytest.approx([2 * r.at_s for r in fast])


def test_a_salt_changes_texts_and_keeps_lengths():
    plain, salted = (synthetic_requests(synthetic(), 3, salt) for salt in ("", ".1"))
    assert [r.num_prompt_tokens for r in plain] == [r.num_prompt_tokens for r in salted]
    maker = TokenPrompts()
    assert all(maker.make(a.prompt) != maker.make(b.prompt)
               for a, b in zip(plain, salted, strict=True))  # fmt: skip


def test_a_closed_loop_has_no_schedule_and_a_trace_without_arrivals_needs_one():
    requests = synthetic_requests(synthetic(2), 0)
    assert [r.at_s for r in with_arrivals(requests, Arrivals(concurrency=1), 0)] == [None, None]
    with pytest.raises(ConfigError, match="--rate or --concurrency"):
        with_arrivals(requests, Arrivals(), 0)


def test_speed_shortens_a_traces_times():
    requests = trace_requests([TraceEntry(0.0, 5, 5), TraceEntry(8.0, 5, 5)], 0)
    assert [r.at_s for r in with_arrivals(requests, Arrivals(speed=4.0), 0)] == [0.0, 2.0]


# ---------------------------------------------------------------- prefixes


def test_synthetic_prefixes_are_shared_and_never_the_whole_prompt():
    requests = synthetic_requests(synthetic(prefix_len=64, num_prefixes=2), 0)
    maker = TokenPrompts()
    prompts = [maker.make(r.prompt) for r in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == request.num_prompt_tokens
        assert request.prompt[0].num_tokens == min(64, len(prompt) - 1)
    long = [p for p in prompts if len(p) > 64]
    assert len({tuple(p[:64]) for p in long}) == 2
    assert len({tuple(p[:65]) for p in long}) == len(long)


def test_blocks_of_equal_id_become_equal_tokens_at_equal_places():
    entries = [
        TraceEntry(0.0, 1300, 4, (0, 1, 2)),  # the last block is partial
        TraceEntry(0.0, 1536, 4, (0, 1, 2)),
        TraceEntry(0.0, 1024, 4, (0, 9)),
    ]
    maker = TokenPrompts()
    first, longer, other = (maker.make(r.prompt) for r in trace_requests(entries, 0))
    assert [len(p) for p in (first, longer, other)] == [1300, 1536, 1024]
    assert longer[:1300] == first  # the same block, further
    assert other[:512] == first[:512]
    assert other[512:520] != first[512:520]


@pytest.mark.parametrize("scale", [0.03, 0.25, 1.7])
def test_scaled_traces_keep_their_shared_prefixes(scale):
    entries = [TraceEntry(0.0, 1500, 10, (0, 1, 2)), TraceEntry(0.0, 2048, 10, (0, 1, 5, 6))]
    requests = trace_requests(entries, 0, length_scale=scale)
    maker = TokenPrompts()
    a, b = (maker.make(r.prompt) for r in requests)
    shared = round(1024 * scale)
    assert len(a) == round(1500 * scale) and len(b) == round(2048 * scale)
    assert a[:shared] == b[:shared] and a[shared] != b[shared]
    assert requests[0].num_output_tokens == max(1, round(10 * scale))


def test_prefix_share_counts_repeated_heads_only():
    entries = [
        TraceEntry(0.0, 1024, 1, (0, 1)),
        TraceEntry(0.0, 1024, 1, (0, 2)),  # half of it again
        TraceEntry(0.0, 1024, 1, (7, 1)),  # block 1 behind another head is no hit
        TraceEntry(0.0, 1024, 1, (0, 2)),  # all of it again
    ]
    assert prefix_share(trace_requests(entries, 0)) == pytest.approx(3 / 8)
    assert prefix_share([]) == 0.0


# ---------------------------------------------------------------- prompts


def test_token_prompts_stay_in_their_range():
    ids = TokenPrompts(100, 110).make([Segment("a", 500)])
    assert len(ids) == 500
    assert set(ids) == set(range(100, 110))


def test_word_prompts_are_corrected_by_what_the_server_counts():
    maker = fit_words((32, 32 * 1.25 + 9), (160, 160 * 1.25 + 9))
    assert maker == WordPrompts(1.25, 9.0)
    words = maker.make([Segment("a", 509)]).split()
    assert len(words) == 400  # (509 - 9) / 1.25
    assert set(words) <= set(WORDS)


def test_word_prompts_share_prefixes_too():
    maker = WordPrompts(1.25, 9.0)
    a = maker.make([Segment("shared", 100), Segment("x", 50)]).split()
    b = maker.make([Segment("shared", 100), Segment("y", 80)]).split()
    shared = round((100 - 9) / 1.25)
    assert a[:shared] == b[:shared] and a[shared:] != b[shared : len(a)]
    assert len(b) == round((180 - 9) / 1.25)


def test_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS) > 100
