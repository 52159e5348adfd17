"""The report's section on memory: a picture to scale, and tables; the same figures in MLflow and on the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optexp.profiling.memory_difference import difference
from optexp.records.memory import AllocationEntry, CacheState, MemoryProfile, MemoryTimeline, SavedEntry
from optexp.reporting import logged, report, summary
from optexp.reporting.memory_plot import HEIGHT, TOP, WIDTH, areas, composition
from optexp.result import Result, Verdict

FASTER = Result.read(Path(__file__).parents[1] / "results" / "faster.json")
MIB = 2**20


def profile(activations: int) -> MemoryProfile:
    """Parameters of 2 MiB and so many MiB of activations, in a step of four moments."""
    return MemoryProfile(
        (2 + activations) * MIB,
        {"parameters": 2 * MIB, "activations": activations * MIB},
        MemoryTimeline(
            [0, 10, 20, 40],
            [0, 20],
            {"parameters": [2 * MIB] * 4, "activations": [0, activations * MIB, 0, activations * MIB]},
        ),
        [
            AllocationEntry("activations", activations * MIB, 3, "gelu", "block.1", "project/model.py:30"),
            AllocationEntry("parameters", 2 * MIB, 1, "<weight>"),
        ],
        [SavedEntry(activations * MIB, "64×64", "float32", 3, "gelu", "block.1", "project/model.py:30")],
        activations * MIB,
        allocations_per_step=17,
        cache=CacheState(9 * MIB, 4 * MIB, 3 * MIB, MIB, 0.5),
    )


def result(verdict: Verdict = Verdict.FASTER) -> Result:
    before, after = profile(6), profile(2)
    arms = FASTER.profile
    assert arms.baseline is not None
    assert arms.candidate is not None
    filled = replace(
        arms,
        baseline=replace(arms.baseline, memory=before),
        candidate=replace(arms.candidate, memory=after),
        memory=difference(before, after),
    )
    return replace(FASTER, verdict=verdict, profile=filled)


def test_areas_are_stacked_to_scale() -> None:
    plot = areas(profile(6), highest=8 * MIB)
    by_category = {area.category: [tuple(map(float, p.split(","))) for p in area.points.split()] for area in plot.areas}
    lowest, highest = (HEIGHT * (1 - size / (8 * TOP)) for size in (2, 8))
    upper = by_category["activations"][:4]
    assert [x for x, _ in upper] == [0, WIDTH / 4, WIDTH / 2, WIDTH]
    assert [y for _, y in upper] == pytest.approx([lowest, highest, lowest, highest], abs=0.1)
    assert [y for _, y in by_category["activations"][4:]] == pytest.approx([lowest] * 4, abs=0.1)
    assert [y for _, y in by_category["parameters"][4:]] == [HEIGHT] * 4
    assert plot.peak == pytest.approx(highest, abs=0.1)
    assert plot.steps == [0, WIDTH / 2]


def test_an_empty_timeline_is_drawn() -> None:
    empty = MemoryProfile(0, {}, MemoryTimeline([], [], {}))
    assert areas(empty, 0).areas == []


def test_the_composition_has_both_arms_and_their_change() -> None:
    rows = {row.category: row for row in composition({"baseline": profile(6), "candidate": profile(2)})}
    assert rows["activations"].bytes == {"baseline": 6 * MIB, "candidate": 2 * MIB}
    assert rows["activations"].change == -4 * MIB
    assert rows["parameters"].change == 0


def test_the_report_shows_it_and_why_the_peak_differs() -> None:
    page = report.render(result())
    assert "Largest allocations alive at the peak" in page
    assert page.count("<polygon") == 4
    assert "project/model.py:30" in page
    assert "&lt;weight&gt;" in page
    assert "Kept for backward: 6 MiB a step" in page
    assert "−4 MiB" in page
    assert "the largest piece 3 MiB" in page
    assert "5 MiB free in the cache" in page
    assert "Peak memory fell, 8 MiB → 4 MiB (−4 MiB): activations kept for backward −4 MiB" in page


def test_a_report_without_it_has_no_such_section() -> None:
    assert "<h2>Memory</h2>" not in report.render(FASTER)


def test_memory_of_a_withheld_verdict_stays_in_the_record_and_no_reason_is_shown() -> None:
    withheld = result(Verdict.NOT_EQUIVALENT)
    withheld.withhold()
    assert withheld.profile.baseline is not None
    assert withheld.profile.baseline.memory is not None
    assert "Peak memory fell" not in report.render(withheld)


def test_a_record_keeps_it(tmp_path: Path) -> None:
    (found := result()).write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json").profile == found.profile


def test_mlflow_gets_the_categories_of_the_peak() -> None:
    found = logged.metrics(result())
    assert found["memory/baseline_activations_mib"] == 6
    assert found["memory/candidate_activations_mib"] == 2
    assert found["memory/candidate_parameters_mib"] == 2
    assert "Peak memory fell" in logged.note(result())


def test_the_difference_is_said_once_where_there_is_one() -> None:
    assert summary.memory_reasons(FASTER) == []
    assert len(summary.memory_reasons(result())) == 2
