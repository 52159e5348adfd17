"""fast_p and its intervals."""

from __future__ import annotations

from math import inf

import pytest
from scipy.special import bdtr

from optexp.judging.fast_p import CONFIDENCE, FastP, Solved, clopper_pearson, fast_p
from optexp.judging.line import Interval, Line
from optexp.records.verdict import Verdict


def line(
    problem: str, verdict: Verdict, *speedup: float | None, candidate: str = "a", entrant: str = "", case: str = ""
) -> Line:
    interval = Interval(*speedup, confidence=0.99, processes=5) if speedup else None  # type: ignore[arg-type,misc]
    return Line(problem + candidate + case, "files", problem, candidate, verdict, "", entrant, case, speedup=interval)


def at(lines: list[Line], p: float, entrant: str = "") -> FastP:
    return next(found for found in fast_p(lines) if found.p == p and found.entrant == entrant)


LINES = [
    line("1", Verdict.FASTER, 2.4, 2.2, 2.6),
    line("2", Verdict.FASTER, 1.6, 1.4, 1.8),
    line("3", Verdict.INCONCLUSIVE, 1.01, 0.9, 1.2),
    line("4", Verdict.SLOWER, 0.5, 0.4, 0.6),
    line("5", Verdict.NOT_EQUIVALENT),
    line("6", Verdict.UNVERIFIED),
]


@pytest.mark.parametrize(
    ("p", "sure", "solved", "perhaps"), [(0.0, 4, 4, 5), (1.0, 2, 3, 4), (1.5, 1, 2, 3), (2.0, 1, 1, 2)]
)
def test_shares_with_what_the_intervals_leave_open(p: float, sure: int, solved: int, perhaps: int) -> None:
    found = at(LINES, p)
    assert (found.sure, found.solved, found.perhaps, found.problems) == (sure, solved, perhaps, 6)
    assert found.low <= sure / 6 <= found.share <= perhaps / 6 <= found.high


def test_correctness_alone_has_fast_0_alone() -> None:
    found = fast_p([line("1", Verdict.VERIFIED), line("2", Verdict.ERROR)])
    assert [(one.p, one.solved, one.problems) for one in found] == [(0.0, 1, 2)]


def test_of_several_candidates_the_best_counts() -> None:
    lines = [LINES[0], line("1", Verdict.ERROR, candidate="b"), line("1", Verdict.FASTER, 1.2, 1.1, 1.3, candidate="c")]
    assert (at(lines, 2.0).solved, at(lines, 2.0).problems) == (1, 1)


def test_a_problem_is_solved_on_all_its_workloads() -> None:
    wrong = [line("1", Verdict.FASTER, 3, 3, 3, case="a"), line("1", Verdict.NOT_EQUIVALENT, case="b")]
    assert at(wrong, 0.0).solved == 0
    both = [line("1", Verdict.FASTER, 4, 2, 8, case="a"), line("1", Verdict.SLOWER, 0.25, 0.125, 0.5, case="b")]
    assert Solved.of(both) == Solved(True, True, pytest.approx(1.0), pytest.approx(0.5), pytest.approx(2.0))  # type: ignore[arg-type]


def test_an_interval_without_an_end_leaves_everything_open() -> None:
    assert Solved.of([line("1", Verdict.INCONCLUSIVE, 1.2, 0.0, None)]) == Solved(
        True, True, pytest.approx(1.2), 0.0, inf
    )  # type: ignore[arg-type]


def test_entrants_score_apart() -> None:
    lines = [line("1", Verdict.VERIFIED, entrant="x"), line("1", Verdict.ERROR, entrant="y")]
    assert (at(lines, 0.0, "x").solved, at(lines, 0.0, "y").solved) == (1, 0)


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (3, 7), (5, 5)])
def test_the_interval_is_the_exact_one(hits: int, count: int) -> None:
    low, high = clopper_pearson(hits, count)
    tail = pytest.approx((1 - CONFIDENCE) / 2)  # of the binomial distribution at either end
    assert bdtr(hits, count, high) == tail if hits < count else high == 1
    assert 1 - bdtr(hits - 1, count, low) == tail if hits else low == 0


def test_what_another_candidate_may_reach_is_possible() -> None:
    lines = [
        line("1", Verdict.FASTER, 1.2, 1.1, 1.3, candidate="a"),
        line("1", Verdict.INCONCLUSIVE, 1.1, 0.5, 3.0, candidate="b"),
        line("2", Verdict.FASTER, 1.2, 1.1, 1.3, candidate="a"),
        line("2", Verdict.UNVERIFIED, candidate="b"),
        line("3", Verdict.FASTER, 1.2, 1.1, 1.3, candidate="a"),
        line("3", Verdict.NOT_EQUIVALENT, candidate="b"),
    ]
    found = at(lines, 2.0)
    assert (found.sure, found.solved, found.perhaps) == (0, 0, 2)
