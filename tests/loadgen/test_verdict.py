"""The verdict can say yes, no, both and nothing."""

import copy

import pytest

from loadgen.verdict import METRICS, Answer, compare_metric, decide

TTFT = METRICS[0]
THROUGHPUT = next(metric for metric in METRICS if not metric.is_lower_better)


def summary(ttft=0.2, itl=0.05, tpot=0.02, tokens=100.0, goodput=None, failed=0):
    return {
        "requests": {"sent": 100, "ok": 100 - failed, "failed": failed, "interrupted": 0},
        "ttft_scheduled_s": {"p50": ttft, "p99": 2 * ttft},
        "itl_s": {"p99": itl},
        "tpot_s": {"p50": tpot},
        "output_tokens_per_s": tokens,
        "goodput_per_s": goodput,
    }


def repeated(noise=0.02, count=3, **values):
    """Repetitions that differ by `noise` around the values."""
    found = []
    for i in range(count):
        factor = 1 + noise * (i - 1)
        made = {k: v if v is None or k == "failed" else v * factor for k, v in values.items()}
        found.append(summary(**made))
    return found


def test_better_and_nothing_worse_is_yes():
    verdict = decide(repeated(itl=0.4), repeated(itl=0.05))
    assert verdict.answer is Answer.YES
    assert "ITL p99 -88%" in verdict.reason


def test_worse_and_nothing_better_is_no():
    verdict = decide(repeated(tokens=150.0), repeated(tokens=90.0))
    assert verdict.answer is Answer.NO
    assert "output throughput -40%" in verdict.reason


def test_better_here_and_worse_there_is_a_trade():
    verdict = decide(repeated(itl=0.4, tokens=150.0), repeated(itl=0.05, tokens=90.0))
    assert verdict.answer is Answer.TRADE
    assert "better: ITL p99" in verdict.reason
    assert "worse: output throughput" in verdict.reason


def test_equals_differ_by_nothing():
    assert decide(repeated(), repeated()).answer is Answer.UNCLEAR


def test_a_difference_inside_the_noise_is_none():
    """30 percent between medians, and repetitions that scatter by 40."""
    verdict = decide(repeated(noise=0.4, ttft=0.2), repeated(noise=0.4, ttft=0.26))
    assert verdict.answer is Answer.UNCLEAR
    assert all(comparison.winner is None for comparison in verdict.comparisons)


def test_a_small_difference_is_none_however_sure():
    assert decide(repeated(noise=0, ttft=0.200), repeated(noise=0, ttft=0.205)).answer \
        is Answer.UNCLEAR  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_repetitions_decide_nothing(count):
    verdict = decide(repeated(count=count, itl=0.4), repeated(count=count, itl=0.05))
    assert verdict.answer is Answer.UNCLEAR
    assert "repetitions" in verdict.reason


@pytest.mark.parametrize(("base", "candidate", "answer"), [(2.0, 3.0, "yes"), (3.0, 2.0, "no")])
def test_goodput_decides_where_slos_are_given(base, candidate, answer):
    """Whatever the other metrics say."""
    verdict = decide(
        repeated(goodput=base, itl=0.1 * base), repeated(goodput=candidate, itl=0.1 * candidate)
    )
    assert verdict.answer == answer
    assert verdict.reason.startswith("goodput decides")


def test_equal_goodput_leaves_it_to_the_other_metrics():
    verdict = decide(repeated(goodput=2.0, itl=0.4), repeated(goodput=2.0, itl=0.05))
    assert verdict.answer is Answer.YES


def test_a_side_that_fails_requests_cannot_win():
    fast_but_failing = repeated(ttft=0.01, failed=20)
    assert decide(repeated(), fast_but_failing).answer is Answer.NO
    assert decide(fast_but_failing, repeated()).answer is Answer.YES


def test_goodput_out_of_nothing_has_no_percentage():
    verdict = decide(repeated(goodput=0.0), repeated(goodput=2.0))
    assert verdict.answer is Answer.YES
    assert "from 0 to 2" in verdict.reason


def test_a_metric_that_nobody_has_is_left_out():
    base, candidate = repeated(), repeated()
    for side in (base, candidate):
        for made in side:
            made["tpot_s"] = {"p50": None}
    assert "TPOT p50" not in [c.metric.name for c in decide(base, candidate).comparisons]


def test_the_direction_of_a_metric():
    assert compare_metric(TTFT, [1, 1, 1], [2, 2, 2]).winner == "base"
    assert compare_metric(TTFT, [2, 2, 2], [1, 1, 1]).winner == "candidate"
    assert compare_metric(THROUGHPUT, [1, 1, 1], [2, 2, 2]).winner == "candidate"
    assert compare_metric(TTFT, [1, 2, 3], [3, 4, 5]).winner is None  # they touch


def test_sides_swapped_swap_the_answer():
    a, b = repeated(itl=0.4), repeated(itl=0.05)
    assert decide(a, b).answer is Answer.YES
    assert decide(copy.deepcopy(b), copy.deepcopy(a)).answer is Answer.NO
