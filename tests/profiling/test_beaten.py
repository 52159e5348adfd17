"""A CPU's ceilings that something beats give no bound, and the reason stands in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optexp.comparison.physics import bound, drop_beaten, least_us, recalibrate
from optexp.profiling.beaten import by_operators, together
from optexp.profiling.calibration import crowded
from optexp.profiling.points import points
from optexp.records.profile import ArmProfile, Calibration, ProfileRecord
from optexp.records.roofline import PhysicalBound, Roofline, StepWork
from optexp.reporting import logged, report, summary
from optexp.result import Result
from optexp.strategy import REASSOCIATES
from tests.profiling.recording import undisturbed

CPU = Calibration("cpu", 2e10, {"float32": 1e11, "bfloat16": 1e10})
FASTER = Path(__file__).parents[1] / "results" / "faster.json"


def session(ceilings: Calibration, result: Any = None) -> Any:
    found = SimpleNamespace(
        calibration=ceilings, work=StepWork(2e9, 0), result=result, experiment=SimpleNamespace(dtype="float32")
    )
    found.calibrated = lambda ceilings: setattr(result.profile, "calibration", ceilings)
    return found


def test_a_product_above_the_ceiling_takes_the_bound_away(tmp_path: Path) -> None:
    a = torch.randn(512, 512)
    trace = undisturbed(lambda: a @ a, tmp_path / "t.json.gz")
    (rate,) = [point.rate for point in points(trace, CPU) if point.name == "aten::mm"]
    assert rate is not None
    slow, near = (by_operators(replace(CPU, matrix={"float32": rate / by}), trace) for by in (2.9, 1.05))
    assert slow.doubt.startswith("aten::mm reached")
    assert (near.doubt, near.matrix["float32"]) == ("", rate)  # a ceiling is no lower than what was reached
    assert max(point.rate / point.ceiling for point in points(trace, slow) if point.rate and point.ceiling) <= 1
    assert by_operators(replace(CPU, device="card"), trace).doubt == ""
    assert bound(session(slow), REASSOCIATES) == PhysicalBound(reason=slow.doubt)
    assert least_us(session(slow), REASSOCIATES) == 0
    assert least_us(session(replace(CPU, matrix={})), REASSOCIATES) > 0


def test_ceilings_measured_beside_other_programs_are_none() -> None:
    assert crowded(0.02) == ""
    assert "no core for 40%" in crowded(0.4)
    later = together(replace(CPU, doubt=crowded(0.4)), Calibration("cpu", 1e10, {"float32": 2e11}))
    assert (later.bandwidth, later.matrix["float32"], later.doubt) == (2e10, 2e11, crowded(0.4))


@pytest.mark.parametrize(("step_us", "known"), [(2000.0, True), (1000.0, False)])
def test_a_measured_step_beats_the_bound(step_us: float, known: bool) -> None:
    result = Result.read(FASTER)
    physics = ArmProfile(roofline=Roofline(PhysicalBound(1500.0, 1500.0, text="0.5 · 1 GB")))
    result.profile = ProfileRecord(baseline=physics, calibration=CPU)
    result.baseline.step_us = step_us
    if not known:
        assert "(beaten, so it is none)" in summary.physics(result).baseline  # of a record made before
    drop_beaten(session(CPU, result))
    assert (summary.physics(result) is not None) == known == ("bound/baseline_us" in logged.metrics(result))
    why = "the baseline's step is 1.5 times faster than this machine's measured ceilings allow"
    assert summary.unbound(result) == ("" if known else f"not known: {why}")
    assert (f"no bound: {why.replace(chr(39), '&#39;')}" in report.render(result)) != known


def test_ceilings_that_are_measured_again_move_the_bounds_that_were_shown() -> None:
    """A reduction that read faster than the first ceilings allow was shown at 0.93 of its least time."""
    result, slow = Result.read(FASTER), replace(CPU, device="card", bandwidth=1e12)
    found = session(slow, result)
    found.stack = found.baseline = SimpleNamespace(contract=REASSOCIATES)
    found.calibrated = lambda ceilings: setattr(found, "calibration", ceilings)
    arm: Any = ArmProfile(roofline=Roofline(bound(found, REASSOCIATES)))
    result.profile = ProfileRecord(candidate=arm, calibration=slow)
    recalibrate(found, replace(slow, bandwidth=2e12))
    now: Any = result.profile.candidate
    assert now.roofline.bound.us == pytest.approx(arm.roofline.bound.us / 2)
