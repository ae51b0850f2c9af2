"""What would have waited at each size, and which sizes were needed lately."""

import pytest

from cluster.hindsight import RecentSizes, VirtualQueues


def test_the_least_size_is_the_one_whose_queue_stays_short() -> None:
    queues = VirtualQueues(most=8)
    # 1000 tokens a worker and look; up to 500 may wait for each.
    assert queues.advance(0, 1000, 500) == 1
    # Of 5000 tokens 4000, 3000, 2000, 1000, 0 are left: on average half of that waited.
    assert queues.advance(5000, 1000, 500) == 3
    # Nothing comes; with three 2000 waited, and 1000 at the end of the look no more.
    assert queues.advance(0, 1000, 500) == 3
    for _ in range(3):
        queues.advance(0, 1000, 500)
    assert queues.advance(0, 1000, 500) == 1


def test_hours_of_too_few_are_soon_forgotten() -> None:
    queues = VirtualQueues(most=8)
    assert [queues.advance(5000, 1000, 500) for _ in range(2000)][-1] == 5
    for _ in range(20):  # at most 20 times 500 tokens a worker are remembered
        queues.advance(0, 1000, 500)
    assert queues.advance(0, 1000, 500) == 1


def test_more_than_may_be_had_is_said_and_costs_no_more() -> None:
    queues = VirtualQueues(most=4)
    assert queues.advance(10**9, 1000, 500) == 5


def test_what_really_waits_counts_for_that_size_and_smaller_ones() -> None:
    queues = VirtualQueues(most=8)
    queues.advance(0, 1000, 500)
    queues.correct(2, 4000)
    assert queues.advance(1000, 1000, 500) == 3
    queues.correct(9, 100_000)  # more than it may have
    assert queues.advance(0, 1000, 500) == 9


def test_recent_sizes_weigh_prompts_and_forget() -> None:
    recent = RecentSizes(span=10)
    assert recent.least(0.9) == 0 and recent.late == 0
    for now, size, prompts in ((0, 2, 85), (2, 7, 10), (4, 9, 5)):
        recent.note(now, size, prompts, is_late=size > 2)
    assert [recent.least(share) for share in (0.5, 0.85, 0.86, 0.95, 0.96, 1)] == [2, 2, 7, 7, 9, 9]
    assert recent.late == pytest.approx(0.15)
    recent.note(12.5, 1, 15, is_late=False)  # the first two are over
    assert recent.least(0.75) == 1 and recent.least(0.8) == 9
    recent.note(100, 3, 0, is_late=True)  # nobody came
    assert recent.least(0.9) == 0 and recent.late == 0
