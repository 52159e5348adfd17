"""fast_p: the share of problems that a set of candidates solves correctly and more than p times as fast.

KernelBench's measure (https://arxiv.org/abs/2502.10517), with two kinds of doubt: each speedup has an interval, and the
problems are a sample of those that could have been asked. fast_0 is the share that is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp, inf, log
from operator import attrgetter

from scipy.special import betaincinv  # scipy.stats has the same by another name, and takes a second to import

from optexp.judging.line import Line
from optexp.records.verdict import Verdict

P = (0.0, 1.0, 1.5, 2.0)
CORRECT = {Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.VERIFIED}
UNDECIDED = {Verdict.UNVERIFIED, Verdict.INVALID}  # may be correct, and may be fast
CONFIDENCE = 0.95  # of the interval over problems


@dataclass(frozen=True)
class Solved:
    """One problem as one candidate solves it: the geometric mean of its workloads' speedups.

    correct, possible: it is, it may be
    estimate, low, high: 0, 0 and infinity where nothing was timed
    """

    correct: bool
    possible: bool
    estimate: float = 0.0
    low: float = 0.0
    high: float = inf

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Solved:
        """All workloads must be correct. Ends of intervals are averaged as the estimates are, which is cautious."""
        correct = all(line.verdict in CORRECT for line in lines)
        possible = all(line.verdict in CORRECT | UNDECIDED for line in lines)
        speedups = [line.speedup for line in lines]
        timed = [speedup for speedup in speedups if speedup is not None]
        if not correct or len(timed) < len(speedups):
            return cls(correct, possible)
        highs = [inf if speedup.high is None else speedup.high for speedup in timed]
        return cls(True, True, *map(_mean, ([s.estimate for s in timed], [s.low for s in timed], highs)))


@dataclass(frozen=True)
class FastP:
    """fast_p of an entrant.

    solved:        problems that are correct and faster than p by their estimates, of `problems`
    sure, perhaps: the same by the lower and by the upper ends of their intervals
    low, high:     interval of the share over problems, of the sure and of the possible ones
    """

    entrant: str
    p: float
    problems: int
    solved: int
    sure: int
    perhaps: int
    low: float
    high: float
    confidence: float = CONFIDENCE

    @property
    def share(self) -> float:
        return self.solved / self.problems


def fast_p(lines: Iterable[Line], ps: Sequence[float] = P) -> list[FastP]:
    """fast_p of every entrant; of several candidates for a problem its best one counts."""
    found = []
    for entrant, own in _grouped(lines, attrgetter("entrant")):
        problems = [best(of_problem) for _, of_problem in _grouped(own, attrgetter("problem"))]
        timed = any(line.speedup is not None for line in own)
        found += [_at(p, entrant, problems) for p in ps if timed or p == 0]
    return found


def best(lines: Sequence[Line]) -> Solved:
    """The best of the candidates for one problem; what another one may reach is possible, too."""
    every = [Solved.of(of_candidate) for _, of_candidate in _grouped(lines, attrgetter("candidate"))]
    highest = max((one.high for one in every if one.possible), default=0.0)
    chosen = max(every, key=lambda one: (one.correct, one.estimate))
    return replace(chosen, possible=any(one.possible for one in every), high=highest)


def _at(p: float, entrant: str, problems: Sequence[Solved]) -> FastP:
    count = len(problems)
    solved = sum(one.correct and (p == 0 or one.estimate > p) for one in problems)
    sure = sum(one.correct and (p == 0 or one.low > p) for one in problems)
    perhaps = sum(one.possible and (p == 0 or one.high > p) for one in problems)
    low, high = clopper_pearson(sure, count)[0], clopper_pearson(perhaps, count)[1]
    return FastP(entrant, p, count, solved, sure, perhaps, low, high)


def clopper_pearson(hits: int, count: int) -> tuple[float, float]:
    """Exact interval of a share, of which `hits` of `count` were seen."""
    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(hits, count - hits + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, count - hits, 1 - tail)) if hits < count else 1.0
    return low, high


def _mean(ratios: Sequence[float]) -> float:
    """Geometric; infinite where one is."""
    if inf in ratios:
        return inf
    return exp(sum(map(log, ratios)) / len(ratios)) if min(ratios) > 0 else 0.0


def _grouped(lines: Iterable[Line], key: Callable[[Line], str]) -> list[tuple[str, list[Line]]]:
    return [(name, list(group)) for name, group in groupby(sorted(lines, key=key), key=key)]
