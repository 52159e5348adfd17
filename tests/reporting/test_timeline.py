"""The report's pictures of a measurement: positions follow from the figures, and missing figures leave no panel."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from optexp.comparison.conclusion import series
from optexp.measurement.gpu import Reading
from optexp.measurement.samples import Sample
from optexp.records.measurement import About, Measurement, ProcessRatio, Severity, Watch
from optexp.records.profile import ProfileRecord
from optexp.reporting import plots, report, timeline
from optexp.result import Result, Speedup, Verdict
from optexp.sweeps import sweep
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
    return replace(FASTER, measurement=measurement(samples), series=series(samples))


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


def throttled(share: int = 4) -> list[Sample]:
    """Every so many pairs the card was too hot, and the candidate took longer."""
    samples = made(constant(2e-3), constant(1e-3), pairs=12, processes=2, noise=0.0)
    for sample in samples:
        for index, pair in enumerate(sample.pairs):
            hot = not index % share
            said = Reading(pair.start_s, sm_mhz=1200.0 if hot else 1980.0, reasons=("thermal slow-down",) * hot)
            slow = replace(pair.candidate, wall_s=1.3e-3 if hot else 1e-3)
            sample.pairs[index] = replace(pair, candidate=slow, readings=(said,))
    return samples


def measurement(samples: list[Sample]) -> Measurement:
    def pairs(which: str) -> list[list[tuple[float, float]]]:
        return [[(p.baseline.step_s * 1e6, p.candidate.step_s * 1e6) for p in getattr(s, which)] for s in samples]

    processes = [ProcessRatio(s.log_ratio, len(s.kept)) for s in samples]
    return Measurement(pairs=pairs("kept"), dropped=pairs("dropped"), processes=processes)


def test_pairs_that_do_not_count_are_marked_and_what_the_card_said_of_them_is_drawn() -> None:
    speedup = Speedup(2.0, 1.99, 2.01, 0.99, 2)
    samples = throttled()
    result = replace(FASTER, speedup=speedup, measurement=measurement(samples), series=series(samples))
    strip = plots.strip(result)
    assert strip is not None
    assert [(len(row.dots), len(row.dropped)) for row in strip.rows] == [(9, 3), (9, 3)]
    assert strip.rows[0].dropped[0] < strip.rows[0].dots[0]
    page = report.render(result)
    assert page.count("<path") == 6
    assert "Crosses are pairs that do not count" in page
    blocks, clock = timeline.panels(result)
    assert [len(dots) for _, processes in blocks.lines for dots in processes] == [9] * 4
    assert [len(dots) for _, processes in clock.lines for dots in processes] == [12] * 2
    assert clock.title == "SM clock, 1200 to 1980 MHz"
    assert "Crosses" not in report.render(measured())


def test_an_invalid_measurement_shows_what_the_card_said_and_no_time() -> None:
    barks = Watch("throttling", False, "the GPU was slowed", Severity.REFUSES, About.MACHINE)
    quiet = [Watch("cores", True, "free", about=About.MACHINE), Watch("modes", True, "modes: 1.5×")]
    result = replace(FASTER, verdict=Verdict.INVALID, headline="INVALID: the GPU was slowed", profile=ProfileRecord())
    samples = throttled()
    result.measurement, result.series = replace(measurement(samples), watchdogs=[barks, *quiet]), series(samples)
    result.withhold()
    assert [watch.name for watch in result.objections] == ["throttling", "cores"]
    assert [panel.title for panel in timeline.panels(result)] == ["SM clock, 1200 to 1980 MHz"]
    page = report.render(result)
    assert "What the card did meanwhile" in page
    assert "block times" not in page
    assert "How long the blocks took" not in page


def test_an_interval_without_an_end_is_drawn(tmp_path: Path) -> None:
    result = replace(measured(), speedup=Speedup(1.2, 0.0, inf, 0.99, 1))
    result.write(tmp_path / "result.json")
    again = Result.read(tmp_path / "result.json")
    assert again.speedup == result.speedup
    assert "interval of the speedup" in report.render(again)
    sweep.record([again, FASTER], tmp_path)
    assert json.loads((tmp_path / "sweep.json").read_text())[0]["speedup"]["high"] is None
    assert (tmp_path / "plots" / "speedup.png").stat().st_size > 0


def test_axes_have_round_numbers() -> None:
    result = measured()
    labels = [label for _, label in timeline.axis(result)]
    assert labels[0] == "0.0 s"
    assert all(label.endswith(" s") for label in labels)
    places = [at for at, _ in timeline.axis(result)]
    assert places == sorted(places)
    assert places[0] >= timeline.MARGIN
    assert places[-1] <= timeline.WIDTH - timeline.MARGIN
    baseline, candidate = timeline.histograms(result)
    assert [label for _, label in baseline.ticks] == ["2 ms", "2.1 ms", "2.2 ms"]
    assert len(candidate.ticks) == 1
    assert "2.1 ms</text>" in report.render(result)


def test_bars_count_every_block() -> None:
    baseline, candidate = timeline.histograms(measured())
    assert baseline.text.startswith("baseline: 2 ms to 2.22 ms a step")
    assert len(baseline.bars) == 12  # as many different times
    assert {bar.height for bar in baseline.bars} == {40}
    assert len(candidate.bars) == 1


@pytest.mark.parametrize("readings", [True, False])
def test_the_page_shows_them(readings: bool) -> None:
    page = report.render(measured(readings))
    assert "How long the blocks took" in page
    assert ("SM clock" in page) is readings
    assert page.count("<circle") > 48
