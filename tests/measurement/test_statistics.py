"""Intervals cover what they say, verdicts follow the interval, break-even pays back exactly."""

from math import log
from random import Random

import pytest

from optexp.measurement.statistics import (
    Interval,
    break_even,
    decide,
    hours_saved,
    over_blocks,
    over_processes,
    precise_enough,
    too_noisy,
)
from optexp.result import Verdict


def test_interval_over_processes_matches_a_textbook_example() -> None:
    interval = over_processes([1.0, 2.0, 3.0, 4.0, 5.0], 0.95)  # mean 3, s = 1.5811, t(0.975, 4) = 2.7764
    assert interval.estimate == pytest.approx(3.0)
    assert interval.half_width == pytest.approx(2.7764 * 1.5811 / 5**0.5, rel=1e-3)


def test_one_process_alone_decides_nothing() -> None:
    assert decide(over_processes([1.0], 0.99), 0.01) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("n", [10, 20, 30])
def test_interval_over_blocks_covers_the_true_median(n: int) -> None:
    random = Random(n)
    trials, missed = 2000, 0
    for _ in range(trials):
        interval = over_blocks([random.gauss(0.0, 1.0) for _ in range(n)], 0.99)
        missed += not interval.low <= 0.0 <= interval.high
    assert missed / trials <= 0.016  # 1 % and sampling error


def test_too_few_blocks_decide_nothing() -> None:
    assert decide(over_blocks([1.0] * 5, 0.99), 0.01) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.02, 1.10, Verdict.FASTER),
        (1.005, 1.10, Verdict.INCONCLUSIVE),
        (0.995, 1.005, Verdict.SAME),
        (0.90, 0.98, Verdict.SLOWER),
        (0.98, 1.02, Verdict.INCONCLUSIVE),
    ],
)
def test_verdict_follows_the_interval(low: float, high: float, verdict: Verdict) -> None:
    assert decide(Interval(log((low * high) ** 0.5), log(low), log(high)), 0.01) is verdict


def test_false_alarms_of_the_whole_rule_on_equal_arms() -> None:
    """A/A data with 0.4 % luck per process: at most 1 % of verdicts claim a difference."""
    random = Random(1)
    wrong = 0
    for _ in range(1000):
        verdict = decide(over_processes([random.gauss(0.0, 0.004) for _ in range(5)], 0.99), 0.01)
        wrong += verdict in (Verdict.FASTER, Verdict.SLOWER)
    assert wrong <= 10


@pytest.mark.parametrize(
    ("low", "high", "noisy"),
    [
        (1.05, 2.58, True),  # seen: a program against itself, on a machine busy with other work
        (4.24, 6.65, False),  # seen: a captured training step, whose eager form scatters
        (1.27, 1.35, False),
        (0.40, 0.97, True),
    ],
)
def test_one_process_that_was_disturbed_decides_nothing(low: float, high: float, noisy: bool) -> None:
    interval = Interval(log((low * high) ** 0.5), log(low), log(high))
    assert decide(interval, 0.01) in (Verdict.FASTER, Verdict.SLOWER)
    assert too_noisy(interval) is noisy


def test_stops_on_precision_and_never_on_significance() -> None:
    significant_but_wide = Interval(0.10, 0.05, 0.15)
    assert not precise_enough(significant_but_wide, 0.005)
    assert precise_enough(Interval(0.0, -0.004, 0.004), 0.005)
    assert precise_enough(Interval(1.6, 1.53, 1.67), 0.005)  # 5 % of a large effect


def test_break_even_is_the_first_step_at_which_the_candidate_is_ahead() -> None:
    baseline_s, speedup, extra = 1e-3, 2.0, 1.0
    steps = break_even(extra, baseline_s, speedup)
    assert steps == 2000
    assert extra + steps * baseline_s / speedup <= steps * baseline_s
    assert break_even(extra, baseline_s, 0.9) is None
    assert break_even(-1.0, baseline_s, 2.0) == 0


def test_hours_saved_are_net_of_setup() -> None:
    assert hours_saved(7_200_000, 3600.0, 1e-3, 2.0) == pytest.approx(0.0)
