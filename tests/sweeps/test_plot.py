"""Pictures of studies show every point, in one unit an axis, and what is undecided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from optexp.result import Verdict
from optexp.sweeps.panels import Panel, by_label
from optexp.sweeps.plot import NARROW, draw, panels, shared, tell
from optexp.sweeps.study import completed, points
from tests.sweeps import recorded
from tests.sweeps.test_study import STUDIES, compared, profiled, study

MEASURED = [name for name in STUDIES if (recorded.PAGES / f"{name}.md").is_file() and recorded.recorded(name)]


@pytest.mark.parametrize("name", MEASURED)
def test_every_recorded_study_is_drawn_with_all_its_points(name: str) -> None:
    """On the axes that its file declares, every point inside, lines told apart, and no figure left out."""
    jobs, declared = recorded.recorded(name), recorded.study(name)
    asked = completed(declared, jobs)
    assert asked.x == declared.x
    found = points(asked, jobs)
    rows = panels(asked, found)
    drawn = [panel for row in rows for panel in row]
    assert {panel.y for panel in drawn} == set(asked.y)
    assert {id(point) for panel in drawn for point in panel.points} == {id(point) for point in found}
    figure = Figure()
    for row in rows:
        for axes, panel in zip(figure.subplots(1, len(row), squeeze=False)[0], row, strict=True):
            panel.draw(axes, shared(row))
            assert_all_inside(axes, panel)


def assert_all_inside(axes: Any, panel: Panel) -> None:
    """Every point of a panel lies between the ends of its axis."""
    if panel.y == "shares":
        return
    low, high = axes.get_ylim() if panel.numeric else axes.get_xlim()
    assert all(low <= point.value(panel.y) / panel.scale[1] <= high for point in panel.drawn)
    if panel.numeric:
        assert (
            len(axes.lines)
            >= len(by_label(panel))
            >= min(2, len({p.cell(n) for p in panel.drawn for n in panel.study.by}))
        )


def test_a_line_has_its_colour_in_every_panel() -> None:
    asked = study(y=["step_us", "speedup"], by="arm")
    found = points(asked, [(compared(size, "amp", 100, 50), "") for size in (8, 16)])
    ((times, speedups),) = panels(asked, found)
    drawn = []
    for panel in (times, speedups):
        panel.draw(axes := Figure().subplots())
        drawn.append({line.get_label(): line.get_color() for line in axes.lines})
    assert drawn[0]["amp"] == drawn[1]["amp"] != drawn[0]["baseline"]


def test_an_axis_has_one_unit() -> None:
    asked = study(by="arm")
    jobs = [(compared(size, "amp", 1000.0 * size, 50), "") for size in (8, 16)]
    found = points(asked, jobs)
    ((panel,),) = panels(asked, found)
    assert panel.title == "time/step, ms"
    (axes,) = Figure().subplots(1, 1, squeeze=False)[0]
    panel.draw(axes)
    assert not [tick.get_text() for tick in axes.get_yticklabels() if "s" in tick.get_text()]


def test_the_undecided_is_hollow_and_said() -> None:
    asked = study(by="arm")
    jobs = [(compared(8, "amp", 100, 50), ""), (compared(16, "amp", 100, 95, Verdict.INCONCLUSIVE), "")]
    ((panel,),) = panels(asked, points(asked, jobs))
    (axes,) = Figure().subplots(1, 1, squeeze=False)[0]
    panel.draw(axes)
    assert [line.get_markerfacecolor() for line in axes.lines].count("white") == 1
    assert "undecided" in [text.get_text() for text in axes.get_legend().get_texts()]
    bars = Panel(asked, points(asked, jobs), points(asked, jobs), "strategy", "step_us")
    bars.draw(axes := Figure().subplots())
    assert sum(bool(patch.get_hatch()) for patch in axes.patches) == 1
    assert "  ".join(text.get_text() for text in axes.texts).count("undecided, 0.947 to 1.16") == 1


def test_words_of_bars_neither_leave_the_picture_nor_cover_each_other() -> None:
    asked = study(by="strategy")
    jobs = [compared(8, "amp", 100, 50), compared(8, "inplace", 100, 95, Verdict.INCONCLUSIVE)]
    lost = compared(8, "fusion[backend=torchscript]", 100, 50, Verdict.UNSUPPORTED)
    lost.headline = "UNSUPPORTED: fusion: CUDA C++ needs a CUDA device, and this run is on the CPU"
    found = points(asked, [(job, "") for job in (*jobs, lost)])
    figure = Figure(figsize=(NARROW, 3.0), layout="constrained")
    Panel(asked, found, found, "strategy", "step_us").draw(axes := figure.subplots())
    figure.draw_without_rendering()
    words = [text for text in axes.texts if text.get_text().startswith("UNSUPPORTED: fusion")]
    assert words
    assert all(text.get_window_extent().x1 <= figure.bbox.width for text in words)
    legend = axes.get_legend()
    assert legend is not None
    beside = [text for text in axes.get_children() if isinstance(text, Text) and text.get_text()] + [axes.xaxis.label]
    assert not any(legend.get_window_extent().overlaps(text.get_window_extent()) for text in beside)


def test_reasons_stand_below_the_picture_once() -> None:
    asked = study(by="arm", tell="why")
    jobs = [(compared(size, "amp", 100, 50), "") for size in (8, 16)]
    for job, _ in jobs:
        job.explanation = ["20 launches became 1"]
    assert tell(asked, points(asked, jobs)) == ["why:", "   8 · amp, 16 · amp: 20 launches became 1"]
    many = [(replace(jobs[0][0], config={**jobs[0][0].config, "workload.size": size}), "") for size in range(20)]
    assert tell(asked, points(asked, many))[1].startswith("   0 · amp, 1 · amp")
    assert "5 · amp and 14 more: 20 launches" in tell(asked, points(asked, many))[1]


def test_pictures_of_every_kind(tmp_path: Path) -> None:
    jobs = [(compared(8, "amp", 100, 50), "a"), (compared(16, "amp", 200, 100), "b")]
    for number, values in enumerate(
        [{"y": ["step_us", "speedup"], "by": "arm", "log": "xy"}, {"x": "step"}, {"x": ["workload.size", "step"]}]
    ):
        asked = study(**values)
        assert draw(asked, points(asked, jobs), tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000
    asked = study(y="shares")
    assert draw(asked, points(asked, [(profiled(8, 10.0, 2e6, 4e11), "")]), tmp_path / "shares.png")
    asked = study(y="gpu_busy")
    assert not draw(asked, points(asked, jobs), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
