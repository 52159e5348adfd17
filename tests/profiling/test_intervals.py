"""Unions of intervals, against counting on a grid."""

import random

from optexp.profiling.intervals import Union


def test_against_counting():
    generator = random.Random(0)
    for _ in range(50):
        spans = [(a, a + generator.randint(0, 6)) for a in (generator.randint(0, 30) for _ in range(8))]
        union = Union(spans)
        covered = [any(a <= t and t + 1 <= b for a, b in spans) for t in range(40)]
        assert union.total == sum(covered)
        low = generator.randint(0, 20)
        high = low + generator.randint(1, 15)
        assert union.within(low, high) == sum(covered[low:high])
        assert sum(b - a for a, b in union.gaps(low, high)) == high - low - sum(covered[low:high])
        assert all(union.within(a, b) == 0 for a, b in union.gaps(low, high))


def test_holds_includes_ends():
    union = Union([(1, 2), (4, 5)])
    assert [union.holds(t) for t in (0.5, 1, 1.5, 2, 3, 4, 5, 6)] == [False, True, True, True, False, True, True, False]


def test_nothing():
    assert Union().total == 0
    assert list(Union().gaps(1, 3)) == [(1, 3)]
