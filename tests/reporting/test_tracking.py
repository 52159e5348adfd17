"""What is logged has the names that people and dashboards depend on, and a store that fails costs only the record."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from optexp.config import Tracking
from optexp.errors import TrackingError
from optexp.reporting import logged, tracking
from optexp.result import ArmSummary, Result, Verdict

RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
FASTER = RESULTS[Verdict.FASTER]


def test_importing_it_does_not_import_mlflow() -> None:
    code = "import optexp.reporting.tracking, sys; sys.exit('mlflow' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metrics_have_their_fixed_names_and_values() -> None:
    found = logged.metrics(FASTER)
    assert {name: value for name, value in found.items() if not name.startswith("profile/")} == {
        "speedup/low": 5.852,
        "speedup/estimate": 5.917,
        "speedup/high": 5.983,
        "time/baseline_us": 751.8,
        "time/candidate_us": 127.2,
        "time/baseline_device_us": 744.1,
        "time/candidate_device_us": 120.9,
        "throughput/baseline": 340500.0,
        "throughput/candidate": 2012000.0,
        "memory/baseline_peak_mib": 41.5,
        "memory/candidate_peak_mib": 48.9,
        "cost/setup_s": 1.9,
        "cost/break_even_steps": 2405.0,
        "equivalence/error_ratio": 1.02,
        "equivalence/max_ratio": 1.11,
    }
    assert found["profile/baseline/launches"] == 47
    assert found["profile/candidate/gpu_busy"] == 0.91


def test_what_is_unknown_or_not_a_number_is_not_a_metric() -> None:
    assert logged.metrics(RESULTS[Verdict.UNSUPPORTED]) == {}
    never = logged.metrics(RESULTS[Verdict.SLOWER])
    assert "cost/break_even_steps" not in never
    odd = replace(RESULTS[Verdict.UNSUPPORTED], baseline=ArmSummary(step_us=float("nan"), throughput=float("inf")))
    assert logged.metrics(odd) == {}


def test_without_a_trustworthy_measurement_there_is_no_speedup() -> None:
    assert not {"speedup/estimate", "cost/break_even_steps"} & logged.metrics(RESULTS[Verdict.INVALID]).keys()


def test_params_are_the_flat_configuration_as_it_is_typed() -> None:
    nested = {"workload": {"_target_": "a.B", "dim": 256}, "horizon_steps": None, "fullgraph": True}
    found = logged.params(replace(FASTER, config=nested, strategy=["amp", "cuda_graph"]))
    assert found == {
        "workload": "mlp",
        "workload.dim": "256",
        "strategy": "amp+cuda_graph",
        "device": "cuda:0",
        "seed": "0",
        "horizon_steps": "null",
        "fullgraph": "true",
    }
    assert len(logged.params(replace(FASTER, config={"long": "x" * 9000}))["long"]) == 6000


def test_a_configuration_with_many_keys_and_odd_ones_is_logged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    names = {f"layers.{index}.*": "w.T" for index in range(150)}
    run = tracking.start(Tracking(), "example")
    run.log(replace(FASTER, config={"strategy": {"replace": {"names": names}}}), tmp_path)
    logged = run.client.get_run(run.run_id).data.params
    assert logged["strategy.replace.names.layers.149._"] == "w.T"
    assert len(logged) == 154


@pytest.mark.parametrize("verdict", Verdict)
def test_tags_and_note_of_every_verdict(verdict: Verdict) -> None:
    result = RESULTS[verdict]
    found = logged.tags(result)
    assert set(found) == {
        "optexp.verdict", "optexp.workload", "optexp.strategy", "optexp.device", "optexp.evidence",
        "optexp.fingerprint", "mlflow.note.content",
    }  # fmt: skip
    assert found["optexp.verdict"] == verdict.value
    assert result.headline in found["mlflow.note.content"]
    assert ("| time/step |" in found["mlflow.note.content"]) == verdict.measured


def test_an_address_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://me:secret@host/db")
    with pytest.raises(TrackingError, match=r"MLflow store nonsense://me:\*\*\*@host/db") as caught:
        tracking.start(Tracking(), "example")
    assert "secret" not in str(caught.value)


def test_a_sweep_and_its_runs_in_a_store_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = tmp_path / "job"
    for name in ("result.json", "report.html", "traces/baseline.json.gz", "plots/a.png", "arms/candidate.log"):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text("{}")

    parent = tracking.start(Tracking(), "sweep", tags={"optexp.sweep": "strategy=cuda_graph"})
    child = tracking.start(Tracking(), "mlp · cuda_graph", parent.run_id)
    child.log(FASTER, job)
    child.finish("FINISHED")
    killed = tracking.start(Tracking(), "mlp · fusion", parent.run_id)
    killed.finish("KILLED")
    parent.finish("KILLED")
    noise = capfd.readouterr()
    assert noise.out + noise.err == ""

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("optexp")
    assert experiment is not None
    assert experiment.artifact_location.startswith((tmp_path / "mlartifacts").as_uri())
    nested = client.search_runs([experiment.experiment_id], f"tags.mlflow.parentRunId = '{parent.run_id}'")
    assert {run.info.run_name: run.info.status for run in nested} == {
        "mlp · cuda_graph": "FINISHED",
        "mlp · fusion": "KILLED",
    }
    run = client.get_run(child.run_id)
    assert run.data.metrics == pytest.approx(logged.metrics(FASTER))
    assert run.data.params == logged.params(FASTER)
    assert run.data.tags.items() >= logged.tags(FASTER).items()
    assert {file.path for file in client.list_artifacts(child.run_id)} == {
        "result.json", "report.html", "traces", "plots",
    }  # fmt: skip
    assert client.get_run(parent.run_id).data.tags["optexp.sweep"] == "strategy=cuda_graph"
    command, page = child.where.splitlines()
    assert command == "mlflow ui --backend-store-uri sqlite:///mlflow.db"
    assert page.startswith(f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?")
    assert page.endswith("viewStateShareKey=optexp")
    wrong = RESULTS[Verdict.NOT_EQUIVALENT]
    tracking.reopen(Tracking(), child.run_id).correct(FASTER, wrong, job)
    run = client.get_run(child.run_id)
    assert run.data.tags["optexp.verdict"] == "NOT_EQUIVALENT"
    assert math.isnan(run.data.metrics["speedup/low"])
    assert run.info.status == "FINISHED"
    tracking.reopen(Tracking(), child.run_id).rename("mlp dim=64 · cuda_graph")
    assert client.get_run(child.run_id).info.run_name == "mlp dim=64 · cuda_graph"
    columns = json.loads(experiment.tags["mlflow.sharedViewState.optexp"])["selectedColumns"]
    kinds = {"tags": run.data.tags, "metrics": run.data.metrics}
    assert all(name.strip("`") in kinds[kind] for kind, _, name in (column.partition(".") for column in columns))
