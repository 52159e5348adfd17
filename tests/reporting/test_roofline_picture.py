"""The roofline as it is drawn, and the row of the bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optexp.records.profile import Calibration, ProfileRecord
from optexp.records.roofline import Ahead, Phase, PhysicalBound, Roofline, RooflinePoint
from optexp.reporting import logged, report, roofline_picture, summary
from optexp.reporting.roofline_picture import picture
from optexp.result import Result
from optexp.support import units

FASTER = Path(__file__).parents[1] / "results" / "faster.json"
CARD = Calibration("card", 4e12, {"float32": 5e13, "tf32": 3e14, "bfloat16": 7e14, "float16": 7.1e14})


def point(name: str, intensity: float, rate: float, share: float) -> RooflinePoint:
    us = 100.0 * share
    flops = rate * us / 1e6
    traffic, arithmetic = "reads float32[64]: 4·(64) B = 256 B", "2·4·8 = 64 FLOP"
    return RooflinePoint(name, "", 1, flops / intensity, flops, traffic, arithmetic, share, us, 5e13)


ARMS = {
    "baseline": Roofline(
        PhysicalBound(120.0, 120.0, 10.0, "0.9 · 1 GB / 4 TB/s"),
        [point("aten::mm", 300.0, 4e13, 0.7), point("aten::add", 0.1, 3e11, 0.2), point("aten::bmm", 20.0, 1e13, 0.1)],
        Ahead(30.0, 80.0, 12),
        [Phase("imports", 1.5), Phase("first step", 0.2)],
    ),
    "candidate": Roofline(PhysicalBound(reason="the step asks for a value"), [point("triton_mm", 200.0, 2e14, 0.9)]),
}


def shown_result() -> Result:
    result = Result.read(FASTER)
    arms = {name: replace(found, roofline=ARMS[name]) for name, found in result.profile.arms().items()}
    result.profile = ProfileRecord(**arms, calibration=CARD)
    return result


def test_operators_lie_below_their_ceilings_in_pixels() -> None:
    found = picture(ARMS, CARD)
    assert found is not None
    by_label = {dot.label: dot for dot in found.dots}
    assert by_label["mm"].x > by_label["bmm"].x > by_label["add"].x
    assert by_label["triton_mm"].y < by_label["mm"].y < by_label["add"].y  # faster is higher
    assert by_label["mm"].radius ** 2 / by_label["add"].radius ** 2 == pytest.approx(0.7 / 0.2, rel=0.02)
    slope = next(roof for roof in found.roofs if roof.slanted)
    flat = [roof for roof in found.roofs if not roof.slanted]
    assert slope.end in [roof.start for roof in flat]  # the fastest arithmetic begins where the slope ends
    assert any("float16" in roof.text and "bfloat16" in roof.text for roof in flat)  # too near for two names
    for dot in found.dots:
        assert found.left <= dot.x <= found.width
        assert 0 <= dot.y <= found.bottom
    assert found.dots[0].radius == max(dot.radius for dot in found.dots)  # small ones are drawn last


def test_without_times_nothing_is_drawn() -> None:
    assert picture({name: arm.untimed() for name, arm in ARMS.items()}, CARD) is None
    assert picture(ARMS, None) is None


def test_the_report_shows_bound_picture_and_formulas() -> None:
    page = report.render(shown_result())
    for text in (
        "at least 120 µs: 0.9 · 1 GB / 4 TB/s", "no bound: the step asks for a value", "2·4·8 = 64 FLOP",
        "reads float32[64]", "80%", "imports", "median of 12",
    ):  # fmt: skip
        assert text in page
    assert page.count("<circle cx") >= 4
    assert roofline_picture.shown(Result.read(FASTER)) is None  # of an older record


def test_the_bound_stands_beside_the_measured_time() -> None:
    result = shown_result()
    row = next(row for row in summary.rows(result) if row.name == summary.BOUND)
    assert row.baseline == f"120 µs ({units.share(120 / result.baseline.step_us)} reached)"
    assert row.candidate == ""
    assert logged.metrics(result)["bound/baseline_us"] == 120
    result.withhold()
    assert summary.physics(result).baseline == "120 µs"  # no time follows from it
    assert result.profile.baseline.roofline.points[0].us is None


def test_records_keep_it(tmp_path: Path) -> None:
    result = shown_result()
    result.write(tmp_path / "result.json")
    again = Result.read(tmp_path / "result.json")
    assert again.profile.baseline.roofline == ARMS["baseline"]
    facts = dict(summary.physical_facts(again))
    assert facts["host ahead"] == "30 µs from a launch to its kernel (median), 80 µs at most"
    assert facts["start"] == "imports 1.5 s, first step 200 ms"
    assert facts["bound"].startswith("0.9")
