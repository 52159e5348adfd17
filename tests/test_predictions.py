"""What strategies can gain is ranked before any is tried, and a measurement is set beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from optexp.comparison import predictions, runner
from optexp.comparison.candidates import Candidate
from optexp.comparison.laboratory import Bench
from optexp.comparison.modes.profile import predict
from optexp.config import search_path
from optexp.pages.rules import bounds
from optexp.profiling.bounds import Bound
from optexp.profiling.breakdown import breakdown
from optexp.profiling.view import View
from optexp.records.prediction import MeasuredPrediction, Prediction
from optexp.records.profile import Calibration
from optexp.reporting import logged, report, summary, terminal
from optexp.result import ArmSummary, Result, Speedup, Verdict
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategies.memory_pool import MemoryPool
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.replace import Replace
from optexp.strategy import Strategy, named
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp
from tests.profiling.conftest import ChromeTrace, small_kernels
from tests.test_end_to_end import BRIEF, TINY

CARD = Calibration("card", 4e12, {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12})
RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parent / "results").glob("*.json")}


def view(timed_us: float | None = None) -> View:
    """45 kernels of 2 µs in 675 µs of the host."""
    build = ChromeTrace(timed_us)
    trace = build.steps(small_kernels(build))
    return View(trace, breakdown(trace, CARD))


def arm(mode: str) -> Any:
    real = Arm()
    real.setup(Spec(Mlp(mode=mode, dim=8, layers=1, batch_size=4), (), "cpu", "float32", 0).pack())
    return SimpleNamespace(call=lambda method, **arguments: method(real, **arguments))


@dataclass
class Theirs(Fusion):
    """Of an extension."""

    times: float = 2.0

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        return Bound(f"{self.times:g} times as fast", view.breakdown.wall_us / self.times)


def test_strategies_are_ranked_by_what_they_can_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the program or the stack refuses, or that know no bound, are left out; one from outside is not."""
    theirs = [named(Theirs(times=times), f"theirs{times:g}") for times in (2, 4)]
    strategies: list[Strategy] = [*theirs, CudaGraph(), FusedOptimizer(), Replace()]
    monkeypatch.setattr(predictions, "installed", lambda: strategies)
    found = predictions.predicted(arm("train"), view(), [], CARD)
    assert [p.strategy.partition(" ")[0] for p in found[:2]] == ["strategy=theirs4"] * 2
    assert found[1].strategy == "strategy=theirs4 strategy.theirs4.mode=max-autotune"
    assert found[1].name == "theirs4 mode=max-autotune"
    assert [round(p.speedup, 3) for p in found] == [4, 4, 2, 2]
    assert found[0].text == "4 times as fast"
    assert predictions.predicted(arm("train"), view(), [Fusion(mode="reduce-overhead")], CARD) == []


def test_every_option_that_answers_a_bottleneck_is_asked() -> None:
    texts = [text for text, _ in predictions.variants([Fusion(), PinnedMemory()])]
    assert texts[:3] == [
        "strategy=fusion",
        "strategy=fusion strategy.fusion.mode=max-autotune",
        "strategy=pinned_memory",
    ]
    assert texts[3].startswith("strategy=pinned_memory strategy.pinned_memory.workers=")


def test_the_timed_step_counts() -> None:
    """Tracing stretches the host: what is saved counts in full, and what is left on the device stays."""
    traced = view()
    wall = traced.breakdown.wall_us
    bound = Bound("", 300.0, 80.0, 100.0)
    assert predictions.timed(bound, traced, wall) == 300.0
    assert predictions.timed(bound, traced, 2 * wall) == 300.0
    assert predictions.timed(bound, traced, wall - 50) == pytest.approx(250.0)
    assert predictions.timed(bound, traced, wall * 0.9) == pytest.approx(max(300.0 - 0.1 * wall, 90.0))
    assert predictions.timed(bound, traced, wall / 3) == pytest.approx(80.0)
    assert predictions.timed(Bound("", 300.0, 0.0, 240.0), traced, wall / 2) == pytest.approx(120.0)
    assert predictions.timed(Bound("", 300.0), traced, wall / 2) == pytest.approx(150.0)
    assert predictions.of_bound("x", Bound("", 300.0, 0.0), traced, wall / 2) is None
    found = predictions.prediction("x", CudaGraph(), traced, CARD, 300.0)
    assert found is not None
    assert (found.step_us, found.bound_us) == (300.0, pytest.approx(90.0))
    assert found.speedup == pytest.approx(300 / 90)


def test_no_prediction_exceeds_the_physical_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which follows from the promise of the whole stack; a step that is faster than it predicts no loss."""
    found = [predictions.of_bound("x", Bound("never late", 10.0, 0.0), view(), 675.0, least) for least in (5, 500, 900)]
    assert [round(p.bound_us) for p in found if p] == [10, 500, 675]
    assert [p.text for p in found if p] == ["never late", *["never late; by physics no less"] * 2]
    monkeypatch.setattr(predictions, "installed", lambda: [named(Theirs(times=9), "theirs")])
    least_us = {"bfloat16": 300.0, None: 600.0}
    for stack, most in (([], 675 / 600), ([Amp()], 675 / 300)):
        plain, *_ = predictions.predicted(
            arm("forward"), view(), stack, CARD, 675.0, lambda promise: least_us[promise.dtype]
        )
        assert plain.speedup == pytest.approx(most)


def test_a_stack_is_predicted_where_all_of_it_is() -> None:
    """Of what it adds to its baseline."""
    graph, pool, unknown = CudaGraph(), MemoryPool(), Replace()

    def of(baseline: list[Strategy], candidate: list[Strategy]) -> Prediction | None:
        return predictions.of_candidate(baseline, candidate, view(), CARD, 675.0)

    both, alone = of([], [pool, graph]), of([pool], [pool, graph])
    assert both is not None
    assert alone is not None
    assert (both.strategy, alone.strategy) == ("memory_pool+cuda_graph", "cuda_graph")
    assert both.bound_us == alone.bound_us == pytest.approx(90.0)
    assert of([], [graph, unknown]) is None
    assert of([pool], [graph]) is None
    assert of([], []) is None
    assert of([], [named(Theirs(), "theirs")]) is not None
    assert of([], [named(Theirs(), "theirs"), graph]) is None, "whose parts are not told"


def measured(speedup: float, low: float) -> Result:
    """Of a step that a graph can make 7.5 times as fast."""
    before, after = ArmSummary(step_us=675.0), ArmSummary(step_us=675.0 / speedup)
    result = replace(RESULTS["FASTER"], baseline=before, candidate=after, notes=[])
    result.speedup = Speedup(speedup, low, speedup + 0.1, 0.99, 3)
    result.profile = replace(result.profile)
    predictions.set_beside(result, [], [CudaGraph()], view(), CARD)
    return result


def test_a_measurement_is_set_beside_its_prediction() -> None:
    result = measured(6.0, 5.9)
    tested = result.profile.prediction
    assert tested is not None
    assert tested.prediction.speedup == pytest.approx(7.5)
    assert (tested.ratio, tested.measured_us) == (pytest.approx(0.8), pytest.approx(112.5))
    assert result.notes == []
    assert summary.prediction(result).startswith("at most 7.50× (the host is never late")
    assert summary.prediction(result).endswith("measured 6.00×, 80% of that")


@pytest.mark.parametrize(("low", "certain"), [(7.95, True), (7.0, False)])
def test_a_measurement_beyond_its_bound_is_noted(low: float, certain: bool) -> None:
    result = measured(8.0, low)
    (note,) = result.notes
    assert "the bound's model or the equivalence check is wrong" in note
    assert ("uncertain: its interval begins at 7.00×" in note) is not certain
    assert "beyond the bound" in summary.prediction(result)
    assert measured(7.8, 7.7).notes == [], "within 5 %"


def test_a_disturbed_profile_predicts_nothing() -> None:
    assert not predictions.disturbed(view(timed_us=400.0), 675.0)
    assert predictions.disturbed(view(timed_us=300.0), 675.0), "timed in that process, before it was traced"
    build = ChromeTrace(timed_us=10.0)
    trace = build.steps(lambda: build.spend("cpu_op", "aten::mm", 100.0))
    assert predictions.disturbed(View(trace, breakdown(trace)), 10.0), "tracing took ten times as long as the step"


def test_a_profile_that_tracing_distorts_predicts_no_gain(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(
        result=replace(RESULTS["PROFILED"], notes=[]), experiment=SimpleNamespace(profile=SimpleNamespace(region=None))
    )
    found: Any = SimpleNamespace(view=view())
    predict(session, SimpleNamespace(), found, ["tracing made a step 9 times slower"])  # type: ignore[arg-type]
    assert session.result.notes == [predictions.UNTRUSTED]
    assert session.result.profile.predictions == []
    build = ChromeTrace(timed_us=10.0)
    trace = build.steps(lambda: build.spend("cpu_op", "aten::mm", 100.0))
    bench = Bench.__new__(Bench)
    bench.session = session
    found = SimpleNamespace(view=View(trace, breakdown(trace)), trace=trace)
    candidate = Candidate(named(Theirs(), "theirs"), {}, [], False)
    _, proposal = bench._proposed(candidate, found, bench._trusted(found), [])
    assert proposal.bound is None, "so that a search tries it all the same"
    assert session.result.notes == [predictions.UNTRUSTED], "one sentence"


def test_the_record_holds_predictions(tmp_path: Path) -> None:
    result = measured(6.0, 5.9)
    result.profile.predictions = [Prediction("strategy=amp", 100.0, 300.0, "half of the bytes")]
    result.write(tmp_path / "result.json")
    again = Result.read(tmp_path / "result.json")
    assert again.profile.predictions == result.profile.predictions
    assert again.profile.prediction == result.profile.prediction
    earlier = RESULTS["PROFILED"].profile
    assert (earlier.predictions, earlier.prediction) == ([], None)
    again.withhold()
    assert (again.profile.predictions, again.profile.prediction) == ([], None)


def test_predictions_are_shown_and_logged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profiled = replace(RESULTS["PROFILED"])
    row = Prediction("strategy=fusion strategy.fusion.mode=max-autotune", 100.0, 300.0, "products <fast>")
    profiled.profile = replace(profiled.profile, predictions=[row])
    terminal.show(profiled, tmp_path)
    text = capsys.readouterr().out
    for part in ("at most", "fusion mode=max-autotune", "3.00×", "100 µs", "products <fast>"):
        assert part in text
    page = report.render(profiled)
    for part in ("What strategies can gain", "3.00×", "products &lt;fast&gt;"):
        assert part in page
    assert logged.metrics(profiled)["prediction/fusion mode max-autotune"] == 3.0
    compared = measured(6.0, 5.9)
    assert "at most 7.50×" in report.render(compared)
    found = logged.metrics(compared)
    assert found["prediction/speedup"] == pytest.approx(7.5)
    assert found["prediction/bound_us"] == pytest.approx(90.0)
    assert found["prediction/measured_over_bound"] == pytest.approx(0.8)


def test_none_is_shown_with_a_verdict_that_shows_no_speedup() -> None:
    refused = replace(RESULTS["INVALID"])
    tested = MeasuredPrediction(Prediction("cuda_graph", 90.0, 675.0, "never late"), 112.5, 0.8, 0.79)
    refused.profile = replace(refused.profile, prediction=tested)
    assert "What strategies can gain" not in report.render(refused)


@pytest.mark.slow
def test_a_prediction_and_its_measurement_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of many small tensors: what a fused one gains is set beside its bound."""
    monkeypatch.setattr(predictions, "disturbed", lambda *_: False)  # as tests that run beside this one do
    search_path.register()
    small = ["workload=mlp", "workload.mode=train", *TINY, *BRIEF, "strategy=fused_optimizer"]
    small += ["measurement.min_effect=0.2", "isolation=none", "tracking.enabled=false"]
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=small)
    compared = runner.run(config, tmp_path, show=lambda *_: None)
    assert compared.verdict in (Verdict.FASTER, Verdict.SAME, Verdict.INCONCLUSIVE), compared.headline
    found = compared.profile.prediction
    assert found is not None
    assert found.prediction.strategy == "fused_optimizer"
    assert compared.speedup is not None
    assert found.ratio == pytest.approx(compared.speedup.estimate / found.prediction.speedup)
    assert summary.prediction(compared).startswith("at most")


def test_the_table_of_bounds_beside_measurements() -> None:
    pairs = [bounds.Bound("mlp", "cuda_graph", "FASTER", measured, 7.5) for measured in (6.0, 8.0, 3.0)]
    unbounded = asdict(bounds.Bound("mlp", "streams", "SAME", 1.0, None))
    text = bounds.text([*map(asdict, pairs), unbounded])
    beyond, first, second, unknown = text.splitlines()[4:8]
    assert beyond.endswith("| 7.50× | 8.00× | 1.07 **beyond** |")
    assert first.endswith("| 7.50× | 6.00× | 0.80 |")
    assert second.endswith("| 7.50× | 3.00× | 0.40 |")
    assert unknown.endswith("| – |")
    assert "3 of 4 comparisons have a bound. Measured/bound is at most 1.05 in 2 of 3 (67%)" in text
    assert "within a factor of 1.3 of 1 in 2 of 3 (67%)" in text
    assert "None of 1" in bounds.text([unbounded])
