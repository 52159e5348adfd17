"""The commit between two that changed a program's speed, in about log₂ of their number comparisons with the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import log, sqrt

from optexp.duets.repository import Commit
from optexp.result import Result, Verdict

REPEATS = (1, 2, 4)  # times the processes of a comparison, while it decides nothing
WIDE = 4  # a half-width of the ends' log-ratio over this leaves as much again between an end and the middle


class Side(StrEnum):
    """The end that a commit is as fast as."""

    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Tried:
    """A commit beside the good one.

    side:   None where several comparisons left it open
    rounds: comparisons, each with more processes than the one before
    """

    commit: Commit
    result: Result
    side: Side | None
    rounds: int


@dataclass(frozen=True)
class Effort:
    """times:   so many times the processes
    half_width: of the log-ratio's interval, at which measuring stops; None for the settings' own
    """

    times: int
    half_width: float | None = None


Measure = Callable[[Commit, Effort], Result]
Show = Callable[[Tried], None]


@dataclass
class Bisection:
    """Both ends, what was tried between them, and the commits of which one made the change.

    measure: compares a commit with the good one
    show:    is given every commit that was tried
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
            return self._try(commit, lambda found: nearer(found, total), abs(log(total)) / WIDE).side

        self.suspects = halved(self.commits, side_of)

    def _try(self, commit: Commit, side_of: Callable[[Result], Side | None], half_width: float | None = None) -> Tried:
        """Compare until it is decided; a comparison that could not be made is not repeated."""
        for rounds, times in enumerate(REPEATS, 1):
            result = self.measure(commit, Effort(times, half_width))
            tried = Tried(commit, result, side_of(result), rounds)
            if tried.side or not result.verdict.measured:
                break
        self.tried.append(tried)
        self.show(tried)
        return tried


def halved(commits: Sequence[Commit], side_of: Callable[[Commit], Side | None]) -> Sequence[Commit]:
    """The commits of which one made the change: one, or several where those between them are undecided.

    Args:
        commits: After the good one, the oldest first; the last is bad.
        side_of: The end that a commit is as fast as; None if undecided: its neighbours are then tried.
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
    """Whether the ends differ; None where that is open."""
    if result.verdict in (Verdict.FASTER, Verdict.SLOWER):
        return Side.BAD
    return Side.GOOD if result.verdict is Verdict.SAME else None


def nearer(result: Result, total: float) -> Side | None:
    """The end whose speed is nearer, if the whole interval lies on its side of the middle.

    Args:
        result: Of a commit beside the good one.
        total: The bad one's ratio.
    """
    speedup, measurement = result.speedup, result.measurement
    if speedup is None or measurement is None or any(watch.undecides for watch in measurement.watchdogs):
        return None
    if speedup.processes == 1 and result.verdict is Verdict.INCONCLUSIVE:
        return None
    low, high = (speedup.low, speedup.high) if total < 1 else (1 / speedup.high, 1 / max(speedup.low, 1e-300))
    middle = sqrt(min(total, 1 / total))
    return Side.BAD if high < middle else Side.GOOD if low > middle else None
