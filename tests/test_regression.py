"""A result beside a recorded one: alarms by intervals, the fingerprint, the exit status, and who is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from math import exp
from pathlib import Path
from random import Random

import pytest
from omegaconf import OmegaConf

from optexp.api import compose
from optexp.comparison import regression, runner
from optexp.config import Experiment, Tracking
from optexp.config.overrides import rewrite
from optexp.config.regression_settings import RegressionSettings
from optexp.errors import ConfigError
from optexp.records.measurement import Measurement, ProcessSpread
from optexp.records.regression import Outcome, Regression
from optexp.records.verdict import Verdict, worst_status
from optexp.reporting import logged, matching, recorded, report, summary, terminal, tracking
from optexp.reporting.recorded import Recorded
from optexp.result import ArmSummary, Result, Speedup
from optexp.sweeps.exit_status import ExitStatus, status

TORCH = "2.13.0+cpu"
SETTINGS = RegressionSettings(against="optexp", threshold=0.1)


def timed(
    candidate_us: float,
    baseline_us: float = 1000,
    processes: int = 5,
    scatter: float = 0.01,
    seed: int = 0,
    **config: str,
) -> Result:
    """A measured result: pairs of step times with lognormal scatter between and in processes."""
    random = Random(seed)

    def pairs() -> list[tuple[float, float]]:
        luck = [exp(random.gauss(0, scatter)) for _ in range(2)]
        return [
            (baseline_us * luck[0] * exp(random.gauss(0, 0.01)), candidate_us * luck[1] * exp(random.gauss(0, 0.01)))
            for _ in range(20)
        ]

    spread = ProcessSpread(scatter, 20) if processes == 1 else None
    speed = baseline_us / candidate_us
    return Result(
        Verdict.FASTER, "FASTER", "mlp", ["fusion"], "cpu", 0, fingerprint="f",
        speedup=Speedup(speed, speed * 0.98, speed * 1.02, 0.99, processes),
        baseline=ArmSummary(step_us=baseline_us), candidate=ArmSummary(step_us=candidate_us),
        measurement=Measurement(pairs=[pairs() for _ in range(processes)], spread=spread),
        environment={"torch": TORCH, "cpu": "a processor"},
        config={"workload": "mlp", "workload.dim": 512, "strategy": "fusion", "dtype": "float32", **config},
    )  # fmt: skip


def beside(new: Result, old: Result, settings: RegressionSettings = SETTINGS) -> Regression:
    return regression.compared(settings, Recorded("a" * 32, datetime(2026, 11, 27), old), new)


# --- intervals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "scatter", "processes", "outcome"),
    [
        (1.00, 0.01, 5, Outcome.NO_REGRESSION),
        (0.70, 0.01, 5, Outcome.NO_REGRESSION),
        (1.05, 0.01, 5, Outcome.NO_REGRESSION),
        (1.25, 0.01, 5, Outcome.ALARM),
        (1.25, 0.10, 5, Outcome.UNDECIDED),  # the point alone would be an alarm
        (1.25, 0.01, 1, Outcome.ALARM),
        (1.25, 0.10, 1, Outcome.UNDECIDED),
    ],
)
def test_an_alarm_takes_an_interval_beyond_the_threshold(
    slower: float, scatter: float, processes: int, outcome: Outcome
) -> None:
    new, old = (timed(500 * by, scatter=scatter, processes=processes, seed=s) for by, s in ((slower, 1), (1, 2)))
    seen = beside(new, old)
    assert seen.outcome is outcome, seen.text
    assert seen.time
    assert seen.time.low < seen.time.estimate < seen.time.high
    assert (seen.time.low > 1.1) is seen.alarm


def test_equal_steps_raise_no_alarm() -> None:
    found = [beside(timed(500, scatter=0.1, seed=n), timed(500, scatter=0.1, seed=n + 1)) for n in range(0, 400, 2)]
    assert not any(seen.alarm for seen in found)


def test_a_speedup_may_be_lost_without_a_slower_step() -> None:
    new, old = timed(500, baseline_us=700), timed(500, baseline_us=1000)
    assert beside(new, old).outcome is Outcome.NO_REGRESSION
    assert beside(new, old, replace(SETTINGS, figure="speedup")).outcome is Outcome.ALARM


def test_a_slower_machine_is_named() -> None:
    text = beside(timed(700, baseline_us=1400), timed(500, baseline_us=1000)).text
    assert "the baseline became slower too" in text
    assert "the baseline became slower too" not in beside(timed(700), timed(500)).text


# --- the fingerprint -------------------------------------------------------------------------------------------------


def test_facts_that_count_and_facts_that_do_not() -> None:
    known = matching.identity(timed(500))
    same = timed(900, **{"measurement": "quick", "seed": "3", "regression.against": "x"})
    assert matching.identity(same) == known
    patched = replace(same, environment={**same.environment, "torch": "2.13.1"})
    assert matching.identity(patched) == known
    newer = replace(patched, environment={**same.environment, "torch": "2.14.0"}, config={**same.config, "dtype": "x"})
    assert matching.differences(known, matching.identity(newer)) == {
        "torch": ["2.13", "2.14"],
        "dtype": ["float32", "x"],
    }
    wide = timed(500, **{"workload.dim": "1024"})
    assert matching.differences(known, matching.identity(wide)) == {"workload.dim": ["512", "1024"]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Record a result in a store of this test; returns its run's id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def record(result: Result, parent: str | None = None, **tags: str) -> str:
        run = tracking.start(Tracking(), "a run", parent, tags)
        (tmp_path / "job").mkdir(exist_ok=True)
        result.write(tmp_path / "job" / "result.json")
        run.log(result, tmp_path / "job")
        run.finish()
        return run.run_id

    return record


def test_the_newest_record_of_the_same_fingerprint_is_found(store: Callable[..., str]) -> None:
    def found(against: str) -> str:
        return regression.check(replace(SETTINGS, against=against), Tracking(), timed(500)).run_id

    missing = regression.check(SETTINGS, Tracking(), timed(500))
    assert missing.outcome is Outcome.NOT_COMPARED
    assert "there is no MLflow store sqlite:///" in missing.text
    store(timed(500, **{"workload.dim": "64"}))
    differs = regression.check(SETTINGS, Tracking(), timed(500))
    assert "workload.dim 64 → 512" in differs.text
    assert differs.differs == {"workload.dim": ["64", "512"]}
    sweep = tracking.start(Tracking(), "a sweep")
    old, tagged, nested = store(timed(500)), store(timed(510), release="v1"), store(timed(505), sweep.run_id)
    alarmed = timed(900)
    store(replace(alarmed, regression=beside(alarmed, timed(500))))
    invalid = timed(500)
    invalid.verdict = Verdict.INVALID
    invalid.withhold()
    store(invalid)
    assert found("optexp") == nested  # neither the alarm nor the refused one
    assert (found(old), found("release:v1"), found("release"), found(sweep.run_id)) == (old, tagged, tagged, nested)
    assert [(r.run_id, r.tags["release"]) for r in recorded.records(Tracking(), "release")] == [(tagged, "v1")]
    nothing = regression.check(replace(SETTINGS, against="none:such"), Tracking(), timed(500))
    assert "none:such is no run, experiment or tag" in nothing.text
    assert matching.Match() == matching.match(Tracking(), "optexp", replace(timed(500), workload="other"))


# --- who is told -----------------------------------------------------------------------------------------------------


def regressed() -> Result:
    new = timed(700)
    return replace(new, regression=beside(new, timed(500)))


def test_an_alarm_is_in_the_record_and_everywhere_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = regressed()
    result.write(tmp_path / "result.json")
    again = Result.read(tmp_path / "result.json")
    assert again.regression == result.regression
    assert again.exit_status == 5
    text = summary.regression(again)
    assert text.startswith("ALARM: time/step 1.4")
    assert logged.tags(again)["optexp.regression"] == text
    report.write(again, tmp_path / "report.html")
    assert "Beside the recorded result" in (tmp_path / "report.html").read_text()
    terminal.show(again, tmp_path)
    assert "regression  ALARM: time/step" in capsys.readouterr().out
    again.withhold()
    assert again.regression is None


@pytest.mark.parametrize(
    ("verdicts", "alarm", "expected"),
    [
        ((), True, 5),
        ((Verdict.NOT_ENGAGED,), True, 5),
        ((Verdict.INVALID,), True, 3),
        ((Verdict.NOT_ENGAGED,), False, 4),
    ],
)
def test_the_status_of_a_sweep(verdicts: Sequence[Verdict], alarm: bool, expected: int) -> None:
    assert worst_status([Verdict.FASTER, *verdicts], alarm) == expected


def test_the_status_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optexp.sweeps.exit_status._finished", [])
    regressed().write(tmp_path / "result.json")
    ExitStatus().on_run_end(OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}}))
    assert status() == 5


def test_the_alert_gets_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    regression.alert('echo "$OPTEXP_ALERT_SUMMARY|$OPTEXP_ALERT_CHANGE|$OPTEXP_ALERT_AGAINST"', regressed(), tmp_path)
    said = capfd.readouterr().out
    assert said.startswith("mlp · fusion: time/step 1.4")
    assert said.endswith(f"|{'a' * 32}\n")
    regression.alert("exit 7", regressed(), tmp_path)
    assert "on_alert ended with status 7: exit 7" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["regression.threshold=0"], "threshold=0.0 must lie between 0 and 10"),
        (["regression.on_alert=mail"], "on_alert needs against"),
        (["regression.figure=memory"], "allowed: time, speedup"),
        (["regression.against=a", "verify=only"], "is for a comparison that is timed"),
        (["regression.against=a", "mode=profile"], "is for a comparison that is timed"),
        (["regression.against=a", "measurement=textbook"], "is for a comparison that is timed"),
    ],
)
def test_a_mistake_is_one_sentence(experiment: Callable[..., Experiment], overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment("workload=gelu", *rewrite(overrides))


QUICK = ["workload=gelu", "workload.size=64", "strategy=inplace", "device=cpu", "measurement=quick", "isolation=none"]
QUICK += [
    "measurement.warmup_s=0.1",
    "measurement.pairs=8",
    "measurement.process_s=1",
    "measurement.verification_seeds=1",
]


def test_a_comparison_looks_its_record_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is far faster, so it raises an alarm, and tells the user's command."""
    monkeypatch.chdir(tmp_path)
    fast = matching.Match(Recorded("b" * 32, datetime(2026, 11, 27), timed(1e-3)))
    monkeypatch.setattr(matching, "match", lambda store, against, result: fast)
    extra = ["tracking.enabled=false", "regression.against=main", "regression.on_alert='touch told'"]
    overrides = [text for text in QUICK if not text.startswith("strategy=")]
    result = runner.run(compose(rewrite([*overrides, *extra]), {"inplace": {}}, {}), tmp_path / "job")
    if result.speedup is None:
        pytest.skip(f"this machine measured nothing: {result.headline}")
    assert result.exit_status == 5
    assert Path("told").is_file()
    written = json.loads((tmp_path / "job" / "result.json").read_text())["regression"]
    assert (written["outcome"], written["against"], written["run_id"]) == ("ALARM", "main", "b" * 32)
