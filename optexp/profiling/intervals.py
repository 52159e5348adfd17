"""Unions of time intervals: the time in which at least one of several activities ran."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[float, float]


class Union:
    """Sorted, disjoint intervals."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        merged: list[list[float]] = []
        for start, end in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            elif end > start:
                merged.append([start, end])
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]

    def __iter__(self) -> Iterator[Interval]:
        return zip(self._starts, self._ends, strict=True)

    def __or__(self, other: Union) -> Union:
        return Union([*self, *other])

    @property
    def total(self) -> float:
        return sum(self._ends) - sum(self._starts)

    def within(self, start: float, end: float) -> float:
        """Length of the covered part of [start, end]."""
        covered = 0.0
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._starts)):
            if self._starts[index] >= end:
                break
            covered += max(min(self._ends[index], end) - max(self._starts[index], start), 0.0)
        return covered

    def overlapping(self, start: float, end: float) -> Iterator[Interval]:
        """Intervals that share time with [start, end]."""
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._starts)):
            if self._starts[index] >= end:
                return
            if self._ends[index] > start:
                yield self._starts[index], self._ends[index]

    def holds(self, moment: float) -> bool:
        """Whether `moment` lies inside, ends included."""
        index = bisect_right(self._starts, moment) - 1
        return index >= 0 and moment <= self._ends[index]

    def gaps(self, start: float, end: float) -> Iterator[Interval]:
        """The parts of [start, end] that are not covered."""
        for begin, finish in self:
            if begin > start:
                yield start, min(begin, end)
            start = max(start, finish)
            if start >= end:
                return
        if end > start:
            yield start, end
