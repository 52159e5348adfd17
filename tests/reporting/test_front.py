"""The top of a report answers: how much, how sure, verified how, and what now."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from optexp.records.measurement import Measurement, Watch
from optexp.records.verification import Finding
from optexp.reporting import front, report
from optexp.result import ArmSummary, Result, Speedup, Verdict

RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
SHOWN = [verdict for verdict in Verdict if verdict.measured]


@pytest.mark.parametrize("verdict", Verdict)
def test_a_picture_only_where_a_speedup_may_be_shown(verdict: Verdict) -> None:
    found = front.front(RESULTS[verdict])
    assert bool(found.interval) == verdict.measured
    assert bool(found.bars) == (verdict.measured or verdict is Verdict.PROFILED)
    assert found.claim + found.basis == re.sub(r" \(seed \d+, step \d+\)", "", RESULTS[verdict].headline)


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.PROFILED])
def test_every_verdict_says_what_to_do(verdict: Verdict) -> None:
    assert front.to_do(replace(RESULTS[verdict], strategy=["fusion"]))


def test_a_failure_is_said_once_and_without_fifteen_digits() -> None:
    wrong, reason = RESULTS["NOT_EQUIVALENT"], "output fails G1 (seed 197462600762038, step 0)"
    assert wrong.equivalence is not None
    found = replace(
        wrong, headline=f"NOT_EQUIVALENT: {reason}", equivalence=replace(wrong.equivalence, headline=reason)
    )
    top = front.front(found)
    assert (top.claim, top.basis) == ("NOT_EQUIVALENT:", " output fails G1")
    assert reason not in [text for _, text in top.checks]


def test_bars_are_as_long_as_steps() -> None:
    bars = front.bars(RESULTS["FASTER"])
    assert [bar.arm for bar in bars] == ["baseline", "cuda_graph"]
    times = RESULTS["FASTER"].baseline.step_us, RESULTS["FASTER"].candidate.step_us
    assert [bar.share for bar in bars] == [100, pytest.approx(100 * times[1] / times[0])]


@pytest.mark.parametrize(("low", "high"), [(1.9, 2.1), (0.5, 0.6), (0.9, 1.1), (1.9, math.inf), (2.0, 2.0)])
def test_an_interval_stands_beside_one(low: float, high: float) -> None:
    estimate = min((low * high) ** 0.5, 2 * low)
    found = front.interval(replace(RESULTS["FASTER"], speedup=Speedup(estimate, low, high, 0.99, 5)))
    assert found is not None
    assert 0 < found.low <= found.estimate <= found.high < found.width
    assert (found.one < found.low) == (low > 1)
    assert (found.one > found.high) == (high < 1)
    (left, _), (right, last) = found.labels
    assert right - left >= front.CLOSE - 1
    assert found.open == (last == "∞") == math.isinf(high)


def test_a_stack_of_the_same_speed_is_proposed_for_its_memory() -> None:
    same = replace(RESULTS["SAME"], strategy=["inplace"])
    lighter = replace(same, baseline=ArmSummary(peak_mib=100.0), candidate=ArmSummary(peak_mib=90.0))
    heavier = replace(lighter, candidate=ArmSummary(peak_mib=99.0))
    assert [front.proposed(result) for result in (lighter, heavier)] == [True, False]
    assert "less memory" in front.to_do(lighter)[0]
    assert "Leave it out" in front.to_do(heavier)[0]
    assert not front.proposed(replace(lighter, strategy=[]))


def test_nothing_is_built_on_the_undecided() -> None:
    page = report.render(RESULTS["INCONCLUSIVE"], paste="model = faster(model)")
    assert "Build nothing on this" in page
    assert "faster(model)" not in page
    assert "faster(model)" in report.render(RESULTS["FASTER"], paste="model = faster(model)")


@pytest.mark.parametrize(
    ("low", "high", "processes", "words"),
    [
        (0.9, 1.2, 5, "the interval holds a loss and a gain. measurement=rigorous measures in more processes than 5."),
        (1.01, 1.2, 5, "the difference may be smaller than what counts. measurement=rigorous"),
        (1.01, 3.0, 1, "the blocks of one process scatter. measurement=default measures in more processes than 1."),
    ],
)
def test_the_undecided_is_told_why(low: float, high: float, processes: int, words: str) -> None:
    speedup = Speedup((low * high) ** 0.5, low, high, 0.99, processes)
    result = replace(RESULTS["INCONCLUSIVE"], speedup=speedup, measurement=None)
    assert front.to_do(result)[0].startswith(f"Build nothing on this: {words}")
    cores = Watch("cores", False, "the baseline had to wait")
    most = front.to_do(replace(result, measurement=Measurement(preset="rigorous")))[0]
    assert "measurement=rigorous" not in most
    disturbed = front.to_do(replace(result, measurement=Measurement(watchdogs=[cores])))[0]
    assert disturbed.endswith("Run again on an idle machine.")


def test_what_is_right_but_weaker_has_no_green_tick() -> None:
    result = RESULTS["FASTER"]
    assert result.equivalence is not None
    weaker = replace(result.equivalence, weakest=Finding("output", error_ratio=6.48))
    page = report.render(replace(result, equivalence=weaker))
    assert next(ok for ok, _ in front.checks(replace(result, equivalence=weaker))) is None
    assert page.count('<span class="try">!</span>') == 2
    assert '<span class="try">!</span>' not in report.render(result)


def test_details_are_folded_and_open_on_paper() -> None:
    page = report.render(RESULTS["FASTER"])
    before, _, after = page.partition("<h2>Why</h2>")
    assert "verified" not in after.partition("<details>")[0]
    for title in ("How sure that is", "Where a step goes", "Is it still right?", "How it was measured"):
        assert f"{title}</summary>" in page, title
    assert "details::details-content" in before.partition("@media print")[2]
