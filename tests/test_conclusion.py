"""Figures for people follow from the samples."""

from __future__ import annotations

import pytest

from optexp.conclusion import summarize
from optexp.measurement.load import Load
from optexp.measurement.sampling import COLD, Pair
from optexp.result import ArmSummary, Result, Verdict
from tests.measurement.samples import constant, made, timing


def test_percentiles_are_of_single_steps_and_the_median_is_of_blocks() -> None:
    samples = made(constant(2e-3), constant(1e-3), noise=0.0)
    for sample in samples:
        sample.alone = {"candidate": [(1000 + i) * 1e-6 for i in range(200)]}
    figures = ArmSummary()
    summarize(figures, "candidate", samples, samples_per_step=32)
    assert figures.step_us == pytest.approx(1000)
    assert figures.throughput == pytest.approx(32_000)
    quarters = (figures.p5_us, figures.alone_us, figures.p95_us, figures.p99_us)
    assert quarters == pytest.approx((1010, 1100, 1190, 1198), abs=1.5)
    assert (figures.device_us, figures.cold_us, figures.energy_j) == (None, None, None)


def test_too_few_steps_have_no_99th_percentile() -> None:
    samples = made(constant(1.0), constant(1.0), pairs=8)
    for sample in samples:
        sample.alone = {"baseline": [1.0, 1.1, 1.2]}
    figures = ArmSummary()
    summarize(figures, "baseline", samples, 1)
    assert figures.alone_us == pytest.approx(1.1e6)
    assert (figures.p5_us, figures.p95_us, figures.p99_us) == (None, None, None)


def test_energy_cold_caches_and_the_device() -> None:
    samples = made(constant(1e-3), constant(1e-3), noise=0.0)
    for sample in samples:
        sample.pairs = [
            Pair(timing(1e-3, device_s=8e-4), timing(1e-3, device_s=7e-4), True),
            Pair(timing(9e-3, device_s=8e-4), timing(9e-3, device_s=9e-4), True, COLD),
        ]
    samples[-1].load = {"candidate": Load(500.0, 0.9, [])}
    figures = ArmSummary()
    summarize(figures, "candidate", samples, 1)
    assert figures.device_us == pytest.approx(700)
    assert figures.cold_us == pytest.approx(900)
    assert figures.energy_j == pytest.approx(0.5)
    assert (figures.power_w, figures.utilisation) == (500.0, 0.9)


def test_no_figure_that_could_be_divided_leaves_with_an_invalid_measurement() -> None:
    figures = dict.fromkeys(vars(ArmSummary()), 1.0)
    result = Result(Verdict.INVALID, "", "mlp", [], "cpu", 0, candidate=ArmSummary(**figures))
    result.withhold()
    left = {name for name, value in vars(result.candidate).items() if value is not None}
    assert left == {"peak_mib", "setup_s", "kernels", "gpu_busy"}
