"""Find the commit that changed a program's speed: bisection, with log₂(number of commits) comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import log, sqrt

from optexp.duets.repository import Commit
from optexp.result import Result, Verdict

REPEATS = (1, 2, 4)  # factors for the number of processes, one round after the other, until a comparison decides
WIDE = 4  # log-ratio of the ends over a comparison's half-width: an interval around an end stays off the middle


class Side(StrEnum):
    """The end whose speed a commit has."""

    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Tried:
    """A commit beside the good one.

    side:   None where all comparisons were undecided
    rounds: comparisons, each with more processes than the one before
    """

    commit: Commit
    result: Result
    side: Side | None
    rounds: int


@dataclass(frozen=True)
class Effort:
    """Limits on the duration of a comparison.

    times:      factor for the number of processes
    half_width: half-width of the log-ratio's interval at which measuring stops; None: as in the settings
    """

    times: int
    half_width: float | None = None


Measure = Callable[[Commit, Effort], Result]
Show = Callable[[Tried], None]


@dataclass
class Bisection:
    """Halves a series of commits until the one that changed the speed is found.

    commits:  after the good commit, the oldest first; the last is bad
    measure:  compares a commit with the good one
    show:     called with every tried commit
    suspects: the commits of which one made the change, after `run`
    """

    commits: Sequence[Commit]
    measure: Measure
    show: Show
    tried: list[Tried] = field(default_factory=list)
    suspects: Sequence[Commit] = ()

    def run(self) -> None:
        """Check that the ends differ, then halve the commits between them. Equal ends leave no suspects."""
        end = self._try(self.commits[-1], differing)
        if end.side is not Side.BAD or end.result.speedup is None:
            return
        total = end.result.speedup.estimate

        def side_of(commit: Commit) -> Side | None:
            return self._try(commit, lambda result: nearer(result, total), abs(log(total)) / WIDE).side

        self.suspects = halved(self.commits, side_of)

    def _try(self, commit: Commit, side_of: Callable[[Result], Side | None], half_width: float | None = None) -> Tried:
        """Compare until a side is decided; a comparison that could not be measured is not repeated."""
        for rounds, times in enumerate(REPEATS, 1):
            result = self.measure(commit, Effort(times, half_width))
            tried = Tried(commit, result, side_of(result), rounds)
            if tried.side or not result.verdict.measured:
                break
        self.tried.append(tried)
        self.show(tried)
        return tried


def halved(commits: Sequence[Commit], side_of: Callable[[Commit], Side | None]) -> Sequence[Commit]:
    """The commits of which one made the change; several, if all commits between them are undecided.

    Args:
        commits: Commits after the good one, the oldest first; the last is bad.
        side_of: The end whose speed a commit has; None if undecided: a neighbour of the commit is tried next.
    """
    low, high, undecided = -1, len(commits) - 1, set[int]()
    while left := [index for index in range(low + 1, high) if index not in undecided]:
        middle = (low + high) // 2
        index = min(left, key=lambda index: abs(index - middle))
        match side_of(commits[index]):
            case Side.GOOD:
                low = index
            case Side.BAD:
                high = index
            case None:
                undecided.add(index)
    return commits[low + 1 : high + 1]


def differing(result: Result) -> Side | None:
    """BAD if the ends differ, GOOD if they are equally fast; None if undecided."""
    if result.verdict in (Verdict.FASTER, Verdict.SLOWER):
        return Side.BAD
    return Side.GOOD if result.verdict is Verdict.SAME else None


def nearer(result: Result, total: float) -> Side | None:
    """The end whose speed is nearer, if the whole interval lies on its side of the middle; else None.

    Args:
        result: Comparison of a commit with the good one.
        total: Speedup of the bad commit over the good one.
    """
    speedup, measurement = result.speedup, result.measurement
    if speedup is None or measurement is None or any(watch.undecides for watch in measurement.watchdogs):
        return None
    if speedup.processes == 1 and result.verdict is Verdict.INCONCLUSIVE:
        return None
    low, high = (speedup.low, speedup.high) if total < 1 else (1 / speedup.high, 1 / max(speedup.low, 1e-300))
    middle = sqrt(min(total, 1 / total))
    return Side.BAD if high < middle else Side.GOOD if low > middle else None
