"""The report's pictures of a measurement: positions follow from the figures, and missing figures leave no panel."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optexp.conclusion import series
from optexp.measurement.gpu import Reading
from optexp.reporting import report, timeline
from optexp.result import Result
from tests.measurement.samples import constant, made

FASTER = Result.read(Path(__file__).parents[1] / "results" / "faster.json")


def measured(readings: bool = True, **slow: float) -> Result:
    """Two processes of twelve pairs; the baseline's blocks get slower as the clock falls."""
    samples = made(lambda index: 2e-3 * (1 + 0.01 * index), constant(1e-3), pairs=12, processes=2, noise=0.0)
    for sample in samples if readings else []:
        sample.pairs = [
            replace(pair, readings=(Reading(pair.start_s, sm_mhz=1980.0 - 10 * index, temperature_c=40.0 + index),))
            for index, pair in enumerate(sample.pairs)
        ]
    pairs = [[[p.baseline.step_s * 1e6, p.candidate.step_s * 1e6] for p in s.kept] for s in samples]
    facts: dict[str, Any] = {"pairs": pairs, "series": series(samples), "processes": [{"log_ratio": 0.7}] * 2}
    return replace(FASTER, measurement=FASTER.measurement | facts)


def test_time_runs_to_the_right_and_larger_values_stand_higher() -> None:
    blocks, clock, temperature = timeline.panels(measured())
    assert re.match(r"block times, -\d\.\d% to \+\d\.\d% of the arm's median", blocks.title)
    assert [name for name, _ in blocks.lines] == ["baseline", "candidate"]
    ((_, processes),) = clock.lines
    assert [len(dots) for dots in processes] == [12, 12]
    xs = [x for dots in processes for x, _ in dots]
    assert xs == sorted(xs)
    assert xs[0] == timeline.MARGIN
    assert xs[-1] == timeline.WIDTH - timeline.MARGIN
    heights = [y for _, y in processes[0]]
    assert heights == sorted(heights)  # downwards in pixels: the clock falls
    assert clock.title == "SM clock, 1870 to 1980 MHz"
    assert temperature.title == "temperature, 40 to 51 °C"


def test_without_a_card_only_the_blocks_are_drawn() -> None:
    (blocks,) = timeline.panels(measured(readings=False))
    assert "block times" in blocks.title
    assert timeline.panels(FASTER) == []  # an older record


def test_bars_count_every_block() -> None:
    baseline, candidate = timeline.histograms(measured())
    assert baseline["text"].startswith("baseline: 2 ms to 2.22 ms a step")
    assert len(baseline["bars"]) == 12  # as many different times
    assert {bar["height"] for bar in baseline["bars"]} == {40}
    assert len(candidate["bars"]) == 1


@pytest.mark.parametrize("readings", [True, False])
def test_the_page_shows_them(readings: bool) -> None:
    page = report.render(measured(readings))
    assert "How long the blocks took" in page
    assert ("SM clock" in page) is readings
    assert page.count("<circle") > 48
