"""Figures for people follow from the samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from optexp.commands.audit import problems
from optexp.comparison.adjudicate import Examined, Facts, adjudicate, facts_of
from optexp.comparison.conclusion import conclude, cost, l2, summarize
from optexp.comparison.measure import Timed
from optexp.comparison.runner import settle
from optexp.comparison.session import Session
from optexp.config import Experiment
from optexp.measurement.gpu import Reading
from optexp.measurement.load import Load
from optexp.measurement.samples import COLD, Pair, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.measurement.watchdogs import slow_start
from optexp.records.measurement import About, Cache, Cost, Measurement, ProcessRatio, Ratio, Severity, Watch
from optexp.records.profile import ArmProfile, TopEntry
from optexp.records.verification import Verification
from optexp.reporting import report, summary
from optexp.reporting.terminal import Progress
from optexp.result import ArmSummary, Placement, Result, Speedup, Verdict, against_itself, finite
from optexp.support.stopwatch import Stopwatch
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
    samples[-1].load = {"candidate": Load(500.0, 1.2e-3, 0.9, [])}
    figures = ArmSummary()
    summarize(figures, "candidate", samples, 1)
    assert figures.device_us == pytest.approx(700)
    assert figures.cold_us == pytest.approx(900)
    assert figures.energy_j == pytest.approx(0.6)  # of a step as long as steps were while it was metered
    assert (figures.power_w, figures.utilisation, figures.load_us) == (500.0, 0.9, pytest.approx(1200))


@pytest.mark.parametrize(("cold_caches", "paid", "steps"), [(False, "warm", 1000), (True, "cold", 61000)])
def test_what_must_be_paid_back_is_compiling_once_where_that_was_seen(cold_caches: bool, paid: str, steps: int) -> None:
    result = Result(Verdict.FASTER, "FASTER", "mlp", ["fusion"], "cuda:0", 0, speedup=Speedup(2.0, 1.9, 2.1, 0.99, 5))
    result.baseline, result.candidate = ArmSummary(step_us=2000, setup_s=1.0), ArmSummary(step_us=1000, setup_s=2.0)
    session: Any = SimpleNamespace(cold_caches=cold_caches, experiment=SimpleNamespace(horizon_steps=3_600_000))
    found = cost(session, result, {"baseline": 1.0, "candidate": 62.0})
    assert (found.paid_back, found.break_even_steps) == (paid, steps)
    assert found.hours_saved == pytest.approx(1 - steps / 3_600_000)
    result.measurement = Measurement(cost=found)
    assert f"paid back after {steps:,} steps ({'empty' if cold_caches else 'warm'} caches, " in summary.cost(result)


def test_an_interval_without_a_lower_end_loses_no_billions_of_hours() -> None:
    result = Result(Verdict.INCONCLUSIVE, "", "mlp", [], "cpu", 0, speedup=Speedup(1.2, 0.0, math.inf, 0.99, 1))
    result.baseline, result.candidate = ArmSummary(step_us=2000, setup_s=1.0), ArmSummary(step_us=1000, setup_s=2.0)
    session: Any = SimpleNamespace(cold_caches=False, experiment=SimpleNamespace(horizon_steps=1000))
    found = cost(session, result, {})
    assert found.hours_saved_at_low is None
    assert found.break_even_steps == "never"


def test_no_figure_that_could_be_divided_leaves_with_an_invalid_measurement() -> None:
    figures = dict.fromkeys(vars(ArmSummary()), 1.0)
    result = Result(Verdict.INVALID, "", "mlp", [], "cpu", 0, candidate=ArmSummary(**figures))
    result.withhold()
    left = {name for name, value in vars(result.candidate).items() if value is not None}
    assert left == {"peak_mib", "setup_s", "kernels", "gpu_busy"}


def test_no_ratio_leaves_with_an_invalid_measurement_in_words_or_figures() -> None:
    heat = Watch("throttling", False, "the GPU was slowed", Severity.REFUSES, About.MACHINE)
    beside = Watch("device and wall", True, "device time improves 1.80×")
    result = Result(Verdict.INVALID, "INVALID: the GPU was slowed", "mlp", ["amp"], "cuda:0", 0)
    result.explanation = ["625 µs a step are saved, 619 µs of them in gaps."]
    longest = TopEntry("aten::mul", 1.0, 0.65, 95.6)
    result.profile.baseline = ArmProfile({"step_us": 146.0, "median_kernel_us": 2.9, "kernels": 3.0}, [], [longest])
    result.placement = Placement([1], "both arms bound to the same 1 core")
    result.measurement = Measurement(
        "default", 0.01, [heat, beside], p_value=1e-9, pairs=[[(1.8, 1.0)]], processes=[ProcessRatio(0.59, 1)],
        cost=Cost(break_even_steps=7), l2=Cache("warm", Ratio(1.8, 1.7, 1.9, "device time 1.80×")),
        unbound="free on all 16 cores it is 1.30×",
    )  # fmt: skip
    result.withhold()
    assert result.measurement is None
    assert result.objections == [heat]
    assert result.explanation == []
    assert result.profile.baseline == ArmProfile({"kernels": 3.0}, [], [replace(longest, us=None)])
    page = report.render(result)
    assert "×" not in page
    assert "aten::mul" in page


def test_cold_pairs_of_a_slowed_card_do_not_count() -> None:
    samples = made(constant(1e-3), constant(1e-3), noise=0.0)
    hot = (Reading(0.0, reasons=("thermal slow-down",)),)
    for sample in samples:
        sample.pairs += [replace(pair, kind=COLD, baseline=timing(2e-3)) for pair in sample.pairs]
        sample.pairs += [replace(pair, kind=COLD, candidate=timing(9e-3), readings=hot) for pair in sample.pairs]
    cold = l2(samples, MeasurementSettings(l2="both"), None).cold
    assert cold is not None
    assert cold.estimate == pytest.approx(2)
    for sample in samples:
        sample.pairs = [replace(p, candidate=replace(p.candidate, device_s=p.candidate.wall_s)) for p in sample.pairs]
    figures = ArmSummary()
    summarize(figures, "candidate", samples, 1)
    assert figures.cold_us == pytest.approx(1000)


def crowded(share: float, baseline_s: float = 2e-3) -> list[Sample]:
    """Arms that seemed slow while blocks were planned, and for so much of their time had no core."""
    samples = made(constant(2e-3), constant(1e-3), noise=0.0001)
    for sample in samples:
        sample.alone = {arm: [1.1e-3] for arm in ("baseline", "candidate")}
        sample.planned_s = {"baseline": baseline_s, "candidate": 0.3}
        sample.pairs = [replace(p, candidate=replace(p.candidate, queued=share)) for p in sample.pairs]
        sample.pairs = [replace(p, baseline=replace(p.baseline, queued=0.0)) for p in sample.pairs]
    return samples


def test_a_slow_start_among_other_programs_decides_nothing(experiment: Of, tmp_path: Path) -> None:
    asked = experiment("workload=gelu", "measurement=quick", "device=cpu", "isolation=none", "strategy=inplace")
    found = concluded(asked, tmp_path, crowded(0.05))
    assert found.verdict is Verdict.INVALID
    assert "300 times as long" in found.headline
    assert found.measurement is None
    result = concluded(asked, tmp_path, crowded(0.4))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "may be due to other programs on its cores" in result.headline
    assert result.speedup is not None
    assert result.speedup.low > 1.9
    result.verdict = Verdict.FASTER
    record = json.loads(json.dumps(finite(asdict(result)), default=str))
    assert "the verdict is FASTER, and the record gives INCONCLUSIVE" in problems(record)


def test_a_baseline_that_starts_as_slowly_shows_that_it_is_the_machine() -> None:
    watch = slow_start(crowded(0.05, baseline_s=0.2))
    assert (watch.ok, watch.refuses, watch.undecides) == (False, False, True)
    assert "the candidate took 300 times as long" in watch.text
    watch = slow_start(crowded(0.05))
    assert (watch.ok, watch.refuses, watch.undecides) == (False, True, False)


def test_a_slow_start_beside_other_programs_on_the_gpu_decides_nothing() -> None:
    samples = crowded(0.05)
    samples[0].foreign = ("process 7 (python, 900 MiB)",)
    watch = slow_start(samples)
    assert (watch.ok, watch.refuses, watch.undecides) == (False, False, True)
    assert "may be due to other programs on its GPU" in watch.text


# --- from samples to the verdict ---------------------------------------------------------------------------------

Of = Callable[..., Experiment]
BFLOAT, HALF = "{amp: {dtype: bfloat16}}", "{amp: {dtype: float16}}"


def concluded(asked: Experiment, folder: Path, timed: float | list[Sample]) -> Result:
    """A comparison whose arms were verified and took these times (or: the baseline so many times the candidate's)."""
    samples = timed
    if isinstance(timed, float):
        samples = made(constant(timed * 1e-3), constant(1e-3), noise=0.0001)
    assert isinstance(samples, list)
    with Progress() as progress:
        session = Session(asked, "cpu", folder, Stopwatch(), progress)
        session.samples, session.result.explanation = 32, ["the step got faster"]
        found = session.result.equivalence = Verification(str(session.contract))
        facts = Facts(examined=[Examined(found)], itself=against_itself(session.result.config))
        conclude(session, facts, Timed(Random(0), samples, setups_s={"baseline": [1.0], "candidate": [1.0]}))
        decision = adjudicate(facts)
        assert decision is not None
        settle(session, decision)
        session.close()
        return session.result


@pytest.mark.parametrize("stacks", [["strategy=baseline"], ["strategy=amp", f"baseline=[{BFLOAT}]"]])
@pytest.mark.parametrize("ratio", [1.03, 0.97])
def test_a_program_is_neither_faster_nor_slower_than_itself(
    stacks: list[str], ratio: float, experiment: Of, tmp_path: Path
) -> None:
    asked = experiment("workload=gelu", "measurement=quick", "device=cpu", "isolation=none", *stacks)
    found = concluded(asked, tmp_path, ratio)
    assert found.verdict is Verdict.INVALID
    assert "the same program differs from itself by 3.0%: the machine disturbs" in found.headline
    assert concluded(asked, tmp_path, 1.0).verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["strategy=amp", f"baseline=[{HALF}]"], ", at bfloat16 precision"),
        (["strategy=inplace", "dtype=bfloat16"], ", at bfloat16 precision"),
        (["strategy=amp", "strategy.amp.dtype=float16", "dtype=bfloat16"], ", at float16 precision"),
        (["strategy=inplace"], ""),
    ],
)
def test_the_headline_names_the_precision_of_the_limits(
    asked: list[str], named: str, experiment: Of, tmp_path: Path
) -> None:
    found = concluded(
        experiment("workload=gelu", "measurement=quick", "device=cpu", "isolation=none", *asked), tmp_path, 1.03
    )
    assert found.verdict is Verdict.FASTER
    assert found.headline.endswith(f"5 processes){named}")


def test_a_small_difference_of_one_process_may_be_its_luck(experiment: Of, tmp_path: Path) -> None:
    asked = experiment("workload=gelu", "measurement=quick", "device=cpu", "isolation=none", "strategy=inplace")
    small, large = (
        concluded(asked, tmp_path, made(constant(ratio * 1e-3), constant(1e-3), processes=1)) for ratio in (1.03, 1.5)
    )
    assert small.verdict is Verdict.INCONCLUSIVE
    assert large.verdict is Verdict.FASTER
    assert "one process; the interval allows for 3 % between processes, as is usual" in large.headline
    assert "so the band allows for 3 % (as steps on a CPU do)" in report.render(large)
    large.write(tmp_path / "result.json")
    again, said = facts_of(Result.read(tmp_path / "result.json")).interval, large.speedup
    assert again is not None
    assert said is not None
    assert again.ratios() == pytest.approx((said.estimate, said.low, said.high))
