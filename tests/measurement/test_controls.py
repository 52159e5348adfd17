"""Controls pass where the measurement works, fail where it is biased, and say where it is too noisy to tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from optexp.measurement import controls
from optexp.measurement.gpu import Reading
from optexp.measurement.samples import DELAYED, SAME, Pair, Sample
from optexp.measurement.settings import MeasurementSettings
from tests.measurement.samples import timing


def rounds(again: float, delayed: float, luck: float = 0.001, processes: int = 5) -> list[Sample]:
    """Control pairs whose second block takes so many times longer than the first, give or take a process's luck."""
    random, samples = Random(3), []
    for _ in range(processes):
        pairs = []
        for kind, factor in ((SAME, again), (DELAYED, delayed)):
            of_process = factor * random.lognormvariate(0, luck)
            for _ in range(12):
                second = timing(1e-3 * of_process * random.lognormvariate(0, 1e-3))
                pairs.append(Pair(timing(1e-3), second, random.random() < 0.5, kind))
        samples.append(Sample(pairs))
    return samples


def test_a_measurement_that_works_passes_both() -> None:
    found = controls.judge(rounds(1.0, 1.05), MeasurementSettings())
    assert controls.failed(found) == []
    assert found["known delay"].found
    assert "a delay of 5% was found: +" in found["known delay"].text


def test_a_biased_one_fails_by_name() -> None:
    (text,) = controls.failed(controls.judge(rounds(1.04, 1.05), MeasurementSettings()))
    assert text.startswith("control A/A: a second process of the baseline takes +")
    (text,) = controls.failed(controls.judge(rounds(1.0, 1.0), MeasurementSettings()))
    assert text.startswith("control known delay: a delay of 5% was not found")


def test_a_noisy_one_says_what_it_cannot_see() -> None:
    found = controls.judge(rounds(1.0, 1.05, luck=0.1), MeasurementSettings())
    assert controls.failed(found) == []
    assert not found["known delay"].found
    assert "cannot be seen" in found["known delay"].text


def test_equal_arms_that_scatter_too_much_have_not_passed() -> None:
    """An interval that holds any difference holds none, too."""
    found = controls.judge(rounds(1.0, 1.05, luck=0.1), MeasurementSettings())["A/A"]
    assert found.ok
    assert not found.found
    assert "too noisy to tell" in found.text
    assert controls.judge(rounds(1.0, 1.05), MeasurementSettings())["A/A"].found


def test_pairs_of_a_slowed_card_are_no_control() -> None:
    hot = (Reading(0.0, reasons=("thermal slow-down",)),)
    samples = rounds(1.0, 1.05)
    for sample in samples:
        slow = [replace(pair, candidate=timing(3e-3), readings=hot) for pair in sample.pairs]
        sample.pairs += slow
    assert controls.failed(controls.judge(samples, MeasurementSettings())) == []
    for sample in samples:
        sample.pairs = [pair for pair in sample.pairs if not pair.counts]
    for control in controls.judge(samples, MeasurementSettings()).values():
        assert (control.ok, control.found) == (True, False)
        assert "slowed in every pair" in control.text


def test_one_process_is_judged_by_its_blocks() -> None:
    found = controls.judge(rounds(1.0, 1.05, processes=1), MeasurementSettings(processes_min=1, processes_max=1))
    assert controls.failed(found) == []
    assert found["known delay"].found


def test_long_steps_have_no_known_delay() -> None:
    samples = [replace(s, pairs=s.of(SAME)) for s in rounds(1.0, 1.05)]
    found = controls.judge(samples, MeasurementSettings())
    assert found["known delay"].ok
    assert "skipped" in found["known delay"].text


def test_what_passed_is_remembered(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "controls.json", controls.judge(rounds(1.0, 1.05), MeasurementSettings())
    assert controls.remembered(path) == {}
    noisy = controls.judge(rounds(1.0, 1.05, luck=0.1), MeasurementSettings())
    controls.remember(path, noisy)
    assert controls.remembered(path) == {}
    controls.remember(path, found)
    known = controls.remembered(path)
    assert {name: control.estimate for name, control in known.items()} == {n: c.estimate for n, c in found.items()}
    assert all(control.text.endswith(f"(remembered from {control.since})") for control in known.values())
    path.write_text("{")
    assert controls.remembered(path) == {}
