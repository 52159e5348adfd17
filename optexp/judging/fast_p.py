"""fast_p: the share of problems that a set of candidates solves correctly and with a speedup above p.

KernelBench's measure (https://arxiv.org/abs/2502.10517), with two uncertainties: each speedup has an interval, and the
problems are a sample of all possible problems. fast_0 is the share of correct solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp, inf, log
from operator import attrgetter

from scipy.special import betaincinv  # scipy.stats also has this function, but takes a second to import

from optexp.judging.line import Line
from optexp.records.verdict import Verdict

P = (0.0, 1.0, 1.5, 2.0)
CORRECT = {Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.VERIFIED}
UNDECIDED = {Verdict.UNVERIFIED, Verdict.INVALID}  # possibly correct and possibly fast
CONFIDENCE = 0.95  # of the interval over problems


@dataclass(frozen=True)
class Solved:
    """One candidate's solution of one problem: its speedup is the geometric mean over the problem's workloads.

    correct:  whether it is correct
    possible: whether it may be correct
    estimate, low, high: speedup and its interval; 0, 0 and infinity where nothing was timed
    """

    correct: bool
    possible: bool
    estimate: float = 0.0
    low: float = 0.0
    high: float = inf

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Solved:
        """The solution by a problem's workloads, which must all be correct. Averaged interval ends are cautious."""
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

    problems:  number of all problems
    solved:    number of correct solutions whose estimated speedup is above p
    sure:      number of correct solutions whose interval lies above p
    perhaps:   number of possibly correct solutions whose interval reaches above p
    low, high: confidence interval of the share: its lower end by `sure`, its upper end by `perhaps`
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
    """fast_p of every entrant; the best of an entrant's candidates for a problem counts."""
    results = []
    for entrant, own in _grouped(lines, attrgetter("entrant")):
        problems = [best(of_problem) for _, of_problem in _grouped(own, attrgetter("problem"))]
        timed = any(line.speedup is not None for line in own)
        results += [_at(p, entrant, problems) for p in ps if timed or p == 0]
    return results


def best(lines: Sequence[Line]) -> Solved:
    """The best of the candidates for solution problem; `possible` and `high` are the best over all candidates."""
    solutions = [Solved.of(of_candidate) for _, of_candidate in _grouped(lines, attrgetter("candidate"))]
    highest = max((solution.high for solution in solutions if solution.possible), default=0.0)
    chosen = max(solutions, key=lambda solution: (solution.correct, solution.estimate))
    return replace(chosen, possible=any(solution.possible for solution in solutions), high=highest)


def _at(p: float, entrant: str, problems: Sequence[Solved]) -> FastP:
    count = len(problems)
    solved = sum(solution.correct and (p == 0 or solution.estimate > p) for solution in problems)
    sure = sum(solution.correct and (p == 0 or solution.low > p) for solution in problems)
    perhaps = sum(solution.possible and (p == 0 or solution.high > p) for solution in problems)
    low, high = clopper_pearson(sure, count)[0], clopper_pearson(perhaps, count)[1]
    return FastP(entrant, p, count, solved, sure, perhaps, low, high)


def clopper_pearson(hits: int, count: int) -> tuple[float, float]:
    """Exact confidence interval of a share, given `hits` of `count`."""
    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(hits, count - hits + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, count - hits, 1 - tail)) if hits < count else 1.0
    return low, high


def _mean(ratios: Sequence[float]) -> float:
    """Geometric mean; infinite where a ratio is."""
    if inf in ratios:
        return inf
    return exp(sum(map(log, ratios)) / len(ratios)) if min(ratios) > 0 else 0.0


def _grouped(lines: Iterable[Line], key: Callable[[Line], str]) -> list[tuple[str, list[Line]]]:
    return [(name, list(group)) for name, group in groupby(sorted(lines, key=key), key=key)]
