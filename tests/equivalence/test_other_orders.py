"""Which failures get further runs of the baseline in other orders, and what may pass after these."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from optexp.errors import Failure
from optexp.records.verification import Finding
from optexp.support.shortage import OUT_OF_MEMORY
from optexp.verification.other_orders import MORE, beside_lotteries, beside_other_orders

USUAL = 4


def finding(error: float, limit: float, gate: str) -> Finding:
    """Of a tensor that is right by all gates but one."""
    used, others = error / limit, dict.fromkeys(("G1", "G2", "G3"), (0.5, 1.0))
    failed = (gate,) if used > 1 else ()
    return Finding("output", gate, not failed, failed, used=used, allowed=others | {gate: (error, limit)})


class Baseline:
    """Each run in another order widens the limit by a tenth."""

    def __init__(self, error: float, gate: str = "G2", later: float | None = None, fits: bool = True) -> None:
        self.errors, self.limit, self.fits = [error, error if later is None else later], 1.0, fits
        self.gate = gate
        self.made: list[tuple[int, int]] = []

    def measure(self, runs: int, first: int) -> None:
        self.made.append((runs, first))
        if not self.fits:
            raise Failure(OUT_OF_MEMORY, "out of memory")
        self.limit += 0.1 * runs

    def judged(self) -> list[list[Finding]]:
        return [[finding(self.errors[min(len(self.made), 1)], self.limit, self.gate)]]

    def passes(self, in_turns: bool = False) -> bool:
        (found,) = beside_other_orders(self.judged(), USUAL, in_turns, self.measure, self.judged)
        return all(each.ok for each in found)


def test_what_passes_needs_no_more_runs() -> None:
    baseline = Baseline(0.9)
    assert baseline.passes()
    assert baseline.passes(in_turns=True)
    assert not baseline.made


@pytest.mark.parametrize(
    ("error", "passes", "runs"), [(2.0, True, [(MORE, 5)]), (3.0, False, [(MORE, 5)]), (9.0, False, [])]
)
def test_what_fails_narrowly_gets_more_runs(error: float, passes: bool, runs: list[tuple[int, int]]) -> None:
    baseline = Baseline(error)
    assert baseline.passes() is passes
    assert baseline.made == runs


def test_a_whole_tensor_that_is_off_gets_none() -> None:
    """Its error is that of many elements, which a few runs tell."""
    baseline = Baseline(1.1, gate="G1")
    assert not baseline.passes()
    assert not baseline.made


@pytest.mark.parametrize(("error", "runs"), [(1.2, [(4, 1)]), (2.0, [(4, 1), (12, 5)]), (999.0, [(4, 1)]), (inf, [])])
def test_where_arms_take_turns_the_usual_runs_come_first(error: float, runs: list[tuple[int, int]]) -> None:
    baseline = Baseline(error)
    assert baseline.passes(in_turns=True) is (error <= 2.0)
    assert baseline.made == runs


def test_where_memory_does_not_suffice_a_failure_stays_one() -> None:
    baseline = Baseline(1.2, fits=False)
    assert not baseline.passes(in_turns=True)
    assert baseline.made == [(4, 1), (12, 5)]


def test_what_was_wrong_once_is_not_forgotten() -> None:
    """A run that is right the next time does not excuse one that no limit allows."""
    assert not Baseline(3.9, later=0.5).passes()
    assert Baseline(2.0, later=0.5).passes()


FAR = "the baseline is 0.09 of its size from float64, and rounding moves it by 1e-06"


class Lottery(Baseline):
    """A baseline far from float64, which further runs explain or do not."""

    def __init__(self, explained: bool, fits: bool = True) -> None:
        super().__init__(0.5, fits=fits)
        self.explained = explained

    def judged(self) -> list[list[Finding]]:
        (found,) = super().judged()
        far = not (self.made and self.explained)
        parted = [replace(each, parted=far, unseen=FAR if far else "") for each in found]
        return [[*parted, replace(found[0], tensor="other", scale=self.limit)]]

    def findings(self) -> list[Finding]:
        (found,) = beside_lotteries(self.judged(), USUAL, self.measure, self.judged)
        return found


def test_a_baseline_that_one_rounding_takes_far_from_float64_is_seen_by_further_runs() -> None:
    baseline = Lottery(explained=True)
    parted, other = baseline.findings()
    assert not parted.unseen
    assert not parted.parted
    assert other.scale == 1.0, "by the limits that it was judged by"
    assert baseline.made == [(MORE, USUAL + MORE + 1)]


@pytest.mark.parametrize("fits", [True, False])
def test_a_baseline_that_computes_something_else_than_float64_stays_unseen(fits: bool) -> None:
    parted, _ = Lottery(explained=False, fits=fits).findings()
    assert parted.parted
    assert parted.unseen == FAR


def test_a_baseline_near_float64_needs_no_further_runs() -> None:
    baseline = Baseline(0.5)
    assert beside_lotteries(baseline.judged(), USUAL, baseline.measure, baseline.judged) == baseline.judged()
    assert not baseline.made
