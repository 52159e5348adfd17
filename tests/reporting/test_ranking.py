"""A row of a sweep's ranking: its figures as numbers and as text, and none that its verdict does not show."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

from optexp.reporting.ranking import RankedRow, rows
from optexp.result import Result, Speedup, Verdict

FASTER = Result.read(Path(__file__).parents[1] / "results" / "faster.json")
SPEEDUP = Speedup(estimate=2.0, low=1.999, high=inf, confidence=0.99, processes=5)


def row(verdict: Verdict) -> RankedRow:
    """A row whose record was not cleared for its verdict."""
    return RankedRow.of(replace(FASTER, verdict=verdict, speedup=SPEEDUP, headline=f"{verdict}: because"), "mlp")


def test_ends_are_rounded_so_that_what_is_promised_holds() -> None:
    faster = row(Verdict.FASTER)
    assert (faster.at_least, faster.estimate, faster.interval) == ("1.99×", "2.00×", "2.00× (1.99 to ∞)")


def test_an_undecided_row_promises_nothing() -> None:
    undecided = row(Verdict.INCONCLUSIVE)
    assert (undecided.at_least, undecided.interval) == ("", "undecided, 1.99 to ∞")


def test_a_refused_row_has_no_time_and_no_speedup_whatever_its_record_holds() -> None:
    refused = row(Verdict.NOT_EQUIVALENT)
    assert (refused.speedup, refused.step_us, refused.note) == (None, None, "because")
    assert not any((refused.at_least, refused.estimate, refused.interval, refused.time))
    assert refused.memory  # no ratio of times follows from it


def test_a_profile_has_the_figures_of_its_only_arm() -> None:
    profiled = row(Verdict.PROFILED)
    assert (profiled.step_us, profiled.peak_mib) == (FASTER.baseline.step_us, FASTER.baseline.peak_mib)
    assert [found.title for found in rows([FASTER, replace(FASTER, workload="gelu")])] == ["mlp", "gelu"]
