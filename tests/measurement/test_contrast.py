"""Intervals of differences of measurements."""

from __future__ import annotations

import random
from math import log, sqrt

import pytest

from optexp.measurement import statistics
from optexp.measurement.contrast import EQUAL, Uncertain, combined, of_processes
from optexp.records.measurement import ProcessSpread

PROCESSES = [[0.30, 0.31, 0.29], [0.33, 0.32, 0.34], [0.28, 0.27, 0.29]]


def test_one_value_keeps_the_interval_of_its_comparison() -> None:
    skewed = [*PROCESSES[0] * 6, 0.5, 0.6]
    for processes, spread in ((PROCESSES, None), ([skewed], ProcessSpread(0.02, 8)), ([skewed], None)):
        alone = statistics.interval(processes, 0.95, spread)
        found = of_processes(processes, 0.95, spread)
        for value in (found, combined([(1, found), (-1, EQUAL)])):
            shown = value.interval(0.95)
            assert [shown.estimate, shown.low, shown.high] == pytest.approx([alone.estimate, alone.low, alone.high])


def test_errors_of_a_difference_add_up() -> None:
    one, other = Uncertain(0.5, 0.03, 4), Uncertain(0.2, 0.04, 4)
    found = combined([(1, one), (-1, other)])
    assert found.estimate == pytest.approx(0.3)
    assert found.error == pytest.approx(0.05)
    assert 4 < found.freedom < 8  # between that of one and that of both


def test_a_program_beside_itself_is_exact() -> None:
    found = combined([(1, Uncertain(0.5, 0.03, 4)), (-1, EQUAL)])
    assert (found.error, found.freedom) == (pytest.approx(0.03), pytest.approx(4))
    assert combined([(1, EQUAL)]).interval(0.99).half_width == 0


def test_the_interval_of_a_difference_holds_the_truth() -> None:
    """In about 95 of 100 experiments, with unequal spreads and few processes."""
    draw, held, rounds = random.Random(1), 0, 400
    for _ in range(rounds):
        one = [[draw.gauss(log(1.5), 0.02)] for _ in range(5)]
        other = [[draw.gauss(log(1.2), 0.10)] for _ in range(5)]
        found = combined([(1, of_processes(one, 0.95)), (-1, of_processes(other, 0.95))]).interval(0.95)
        held += found.low <= log(1.5 / 1.2) <= found.high
    assert abs(held / rounds - 0.95) < 4 * sqrt(0.05 * 0.95 / rounds)
