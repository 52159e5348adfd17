"""An explanation agrees with the steps that were timed, or there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optexp.comparison.explained import explain_the_timed
from optexp.profiling.breakdown import breakdown
from optexp.profiling.explanation import difference
from optexp.profiling.view import View
from optexp.result import Result, Verdict
from optexp.trace import Trace

RECORD = Path(__file__).parents[1] / "results" / "faster.json"


def explained(before: Trace, after: Trace, before_us: float, after_us: float) -> Result:
    views = View(before, breakdown(before)), View(after, breakdown(after), beside=before)
    result = Result.read(RECORD)
    result.baseline.step_us, result.candidate.step_us = before_us, after_us
    result.profile.difference = difference(*views)
    explain_the_timed(result, Verdict.FASTER, views)
    return result


def test_gaps_are_those_of_the_timed_steps(eager: Trace, captured: Trace) -> None:
    result = explained(eager, captured, 500.0, 110.0)  # traced: 675 µs and 114 µs
    found = result.profile.difference
    assert found is not None
    assert found.us == pytest.approx(-390.0)
    assert sum(cause.us or 0.0 for cause in found.causes) == pytest.approx(-390.0)
    assert found.explained == pytest.approx(1, abs=0.02)
    assert result.explanation[0].startswith("The step got faster, 500 µs → 110 µs: gaps while the host dispatched −")
    assert result.explanation[-1] == "Of −390 µs a step, these causes explain 100 %"


def test_what_the_traces_do_not_show_is_unexplained(eager: Trace, captured: Trace) -> None:
    result = explained(eager, captured, 500.0, 60.0)  # kernels alone take 90 µs
    found = result.profile.difference
    assert found is not None
    assert found.us == pytest.approx(-440.0)
    assert found.unexplained_us == pytest.approx(60.0 - 90.0, abs=2)
    assert result.explanation[-1].startswith("Of −440 µs a step, these causes explain 93 %; −3")


def test_kernels_at_another_clock_are_those_of_the_timed_steps(products: Trace, passes: Trace) -> None:
    """BERT that is faster by 3 %: its traced steps take one percent more and less than the timed ones."""
    before, after = (breakdown(trace).wall_us for trace in (products, passes))
    result = explained(products, passes, 0.99 * before, 1.01 * after)
    found = result.profile.difference
    assert found is not None
    assert found.explained == pytest.approx(1, abs=0.01)
    assert sum(cause.us or 0.0 for cause in found.causes) == pytest.approx(1.01 * after - 0.99 * before)
    assert result.explanation[-2].startswith("Kernels are scaled from the traced to the timed steps by -")


def test_a_step_of_another_length_explains_nothing(eager: Trace, captured: Trace) -> None:
    result = explained(eager, captured, 200.0, 114.0)
    assert result.profile.difference is None
    assert result.explanation == [
        "No explanation: a step of the profiled baseline took 3.4 times as long as a timed one; something disturbed one"
        " of them"
    ]


def test_a_host_that_tracing_slows_more_than_twice_is_explained_by_its_own_untraced_steps(
    eager: Trace, captured: Trace
) -> None:
    """An MLP on a slow host: 1.71 ms traced, 958 µs in the same process without tracing, 681 µs where it was timed."""
    slowed = replace(eager, timed_us=320.0)
    result = explained(slowed, captured, 300.0, 114.0)  # traced: 675 µs
    found = result.profile.difference
    assert found is not None
    assert found.us == pytest.approx(-186.0)
    assert found.explained == pytest.approx(1, abs=0.05)
