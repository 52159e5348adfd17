"""Steps in series of step times: found where the level moved, and nowhere else."""

from __future__ import annotations

import sys
from random import Random

import pytest

from optexp.errors import ConfigError
from optexp.measurement import change_points
from optexp.pages.rules import detections
from tests.benchmarks import change_points as benchmark


@pytest.fixture(autouse=True)
def _needs_ruptures() -> None:
    pytest.importorskip("ruptures", reason="the extra [watch] is not installed")


@pytest.mark.parametrize(("size", "noise"), [(0.03, 0.005), (0.07, 0.02), (-0.1, 0.02), (0.2, 0.02)])
def test_a_step_is_found_where_it_is(size: float, noise: float) -> None:
    random = Random(3)
    values = [
        value * (1 + size if n >= 40 else 1) for n, value in enumerate(benchmark.series(random, 80, noise, 0).values)
    ]
    (found,) = change_points.steps(values)
    assert abs(found.index - 40) <= detections.TOLERANCE
    assert found.change == pytest.approx(size, abs=1.5 * noise)


def test_a_thousand_equal_points_raise_no_alarm() -> None:
    """With outliers, with drift, and while they come in."""
    random = Random(4)
    for noise in benchmark.NOISE:
        assert change_points.steps(benchmark.series(random, 1000, noise, 0).values) == []
    values = benchmark.series(random, 1000, 0.01, 0).values
    assert [index for end in range(20, 1001, 20) for index in benchmark.ours(values[:end])] == []
    assert change_points.steps([500.0] * 1000) == []


def test_a_step_shows_after_a_few_points() -> None:
    values = benchmark.series(Random(5), 60, 0.01, 0).values
    slower = [*values[:50], *(1.1 * value for value in values[50:])]
    first = next(end for end in range(50, 61) if change_points.steps(slower[:end]))
    assert first <= 56


def test_an_outlier_and_a_short_series_are_no_steps() -> None:
    values = benchmark.series(Random(6), 60, 0.005, 0, drift=0).values
    assert change_points.steps([*values[:30], 3 * values[30], *values[31:]]) == []
    assert change_points.steps([100.0, 100.0, 200.0, 200.0]) == []


def test_without_ruptures_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_points, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need the extra \[watch\]: pip install"):
        change_points.require()


def test_detectors_are_scored() -> None:
    """A second alarm of one step is false, and one too far away as well."""
    count = detections.Count()
    count.add({50: 0.1, 90: -0.05}, [49, 52, 94])
    assert (count.hits, count.precision, count.recall) == (1, pytest.approx(1 / 3), 0.5)
    assert count.found == {0.1: [True], 0.05: [False]}
    stepped = [100.0 + n % 3 for n in range(30)] + [120.0 + n % 3 for n in range(30)]
    assert benchmark.threshold(stepped)[0] == 30
    assert benchmark.t_test(stepped) == [30]
    assert "otava" in sys.modules or "E-divisive (Apache Otava)" not in benchmark.detectors()
