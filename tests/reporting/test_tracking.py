"""What is logged has the names that people and dashboards depend on, and a store that fails costs only the record."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from optexp.comparison.recorder import Recorder, silent
from optexp.config import Tracking, experiment, search_path
from optexp.errors import TrackingError
from optexp.reporting import logged, tracking
from optexp.reporting.terminal import Progress
from optexp.result import ArmSummary, Result, Verdict
from optexp.support.stopwatch import Stopwatch
from optexp.workloads.mlp import Mlp

RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
FASTER = RESULTS[Verdict.FASTER]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store: making one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    tracking.start(Tracking(uri=f"sqlite:///{folder}/mlflow.db"), "first").finish()
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which holds the store."""
    monkeypatch.chdir(made)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


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


def test_params_are_what_a_person_compares_as_it_is_typed() -> None:
    typed = {"workload.dim": 64, "workload.bias": True, "workload.target": "x" * 9000, "workload.names.*": None}
    settings = {**FASTER.config, **typed, "measurement.pairs": 50}
    found = logged.params(replace(FASTER, config=settings, strategy=["amp", "cuda_graph"], compared=list(typed)))
    assert found == {
        "workload": "mlp",
        "workload.dim": "64",
        "workload.bias": "true",
        "workload.target": "x" * 6000,
        "workload.names._": "null",
        "strategy": "amp+cuda_graph",
        "baseline": "baseline",
        "device": "cuda:0",
        "dtype": "float32",
        "measurement": "default",
    }


def test_a_case_is_the_workload_with_the_keys_that_tell_it_from_others() -> None:
    found = replace(FASTER, config={"workload.dim": 64, "workload.layers": 4}, compared=["workload.dim"])
    assert logged.case(found) == "mlp dim=64"


def test_a_workload_is_told_from_others_by_what_was_typed_or_is_not_the_default() -> None:
    typed = ["workload=mlp", "workload.dim=256", "workload.layers=2"]
    with initialize_config_dir(str(search_path.CONF), version_base=None):
        HydraConfig.instance().set_config(compose("config", ["hydra.sweep.subdir=0", *typed], return_hydra_config=True))
    try:
        workload = Mlp(dim=256, layers=2, batch_size=8)  # 256 is the default, and was typed
        assert set(experiment.compared(workload)) == {"workload.dim", "workload.layers", "workload.batch_size"}
    finally:
        HydraConfig.instance().cfg = None
    assert experiment.compared(Mlp(layers=2)) == ["workload.layers"]


def test_the_card_and_the_load_are_system_metrics_and_few_points() -> None:
    process: dict[str, list[float | None]] = {"at_s": [float(n) for n in range(200)], "power_w": [300.0] * 199 + [None]}
    points = logged.system(replace(FASTER, series=[process]))
    names = [point.name for point in points]
    assert names.count("system/gpu_power_usage_watts") == 50
    assert names.count("system/cpu_load_average") == 1
    assert points[-1].at_s == 196


def test_many_figures_and_keys_are_logged_too(folder: Path) -> None:
    run = tracking.start(Tracking(), "example")
    many = {f"key {index}": "value" for index in range(150)}
    run.log_batch(dict.fromkeys((f"figure/{index}" for index in range(900)), 1.0), many)
    data = run.client.get_run(run.run_id).data
    assert (len(data.params), len(data.metrics)) == (150, 900)


@pytest.mark.parametrize("verdict", Verdict)
def test_tags_and_note_of_every_verdict(verdict: Verdict) -> None:
    result = RESULTS[verdict]
    found = logged.tags(result)
    assert set(found) == {
        "optexp.verdict", "optexp.workload", "optexp.case", "optexp.strategy", "optexp.device", "optexp.evidence",
        "optexp.fingerprint", "mlflow.note.content", "optexp.torch", "optexp.cuda", "optexp.triton", "optexp.driver",
        "optexp.python",
    }  # fmt: skip
    assert found["optexp.verdict"] == verdict.value
    assert found["mlflow.note.content"].startswith(f"**{verdict}")
    assert result.headline in found["mlflow.note.content"]
    assert ("| time/step |" in found["mlflow.note.content"]) == verdict.measured


def test_an_address_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://me:secret@host/db")
    with pytest.raises(TrackingError, match=r"MLflow store nonsense://me:\*\*\*@host/db") as caught:
        tracking.start(Tracking(), "example")
    assert "secret" not in str(caught.value)


def test_a_sweep_and_its_runs_in_a_store_of_their_own(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    found = client.get_experiment_by_name("optexp")
    assert found is not None
    assert found.artifact_location.startswith((folder / "mlartifacts").as_uri())
    nested = client.search_runs([found.experiment_id], f"tags.mlflow.parentRunId = '{parent.run_id}'")
    assert {run.info.run_name: run.info.status for run in nested} == {
        "mlp · cuda_graph": "FINISHED",
        "mlp · fusion": "KILLED",
    }
    run = client.get_run(child.run_id)
    assert run.data.metrics.items() >= logged.metrics(FASTER).items()
    assert run.data.metrics.keys() - logged.metrics(FASTER) == {"system/cpu_load_average"}
    assert run.data.params == logged.params(FASTER)
    assert run.data.tags.items() >= logged.tags(FASTER).items()
    assert {file.path for file in client.list_artifacts(child.run_id)} == {
        "result.json", "report.html", "traces", "plots",
    }  # fmt: skip
    assert client.get_run(parent.run_id).data.tags["optexp.sweep"] == "strategy=cuda_graph"
    assert child.where == "python -m optexp.ui"
    assert replace(child, experiment="of mine").where == "python -m optexp.ui --experiment 'of mine'"
    wrong = RESULTS[Verdict.NOT_EQUIVALENT]
    tracking.reopen(Tracking(), child.run_id).correct(FASTER, wrong, job)
    run = client.get_run(child.run_id)
    assert run.data.tags["optexp.verdict"] == "NOT_EQUIVALENT"
    assert math.isnan(run.data.metrics["speedup/low"])
    assert run.info.status == "FINISHED"
    tracking.reopen(Tracking(), child.run_id).rename("mlp dim=64 · cuda_graph")
    assert client.get_run(child.run_id).info.run_name == "mlp dim=64 · cuda_graph"
    view = json.loads(json.loads(found.tags["mlflow.sharedViewState.optexp"])["state"])
    kinds = {"tags": run.data.tags, "metrics": run.data.metrics, "params": run.data.params}
    columns = (column.partition(".") for column in view["selectedColumns"])
    assert all(name.strip("`") in kinds[kind] for kind, _, name in columns)
    assert all(chart.get("metricKey", "speedup/low") in run.data.metrics for chart in view["compareRunCharts"])
    first = view["compareRunCharts"][0]  # speedup over strategy
    assert (first["xaxis"]["key"] in run.data.params, first["yaxis"]["key"] in run.data.metrics) == (True, True)


def test_an_experiment_leads_to_the_view_unless_a_person_described_it(folder: Path) -> None:
    run = tracking.start(Tracking(experiment="any"), "a run")
    assert run.where == tracking.reopen(Tracking(experiment="any"), run.run_id).where
    assert run.where == "python -m optexp.ui --experiment any"
    assert f"(#/experiments/{run.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=optexp)" in str(
        run.client.get_experiment(run.experiment_id).tags["mlflow.note.content"]
    )
    run.client.set_experiment_tag(run.experiment_id, "mlflow.note.content", "of the team")
    tracking.start(Tracking(experiment="any"), "another")
    assert run.client.get_experiment(run.experiment_id).tags["mlflow.note.content"] == "of the team"


def test_an_error_is_no_success_in_the_store(folder: Path, tmp_path: Path) -> None:
    sent = replace(RESULTS[Verdict.ERROR], id="of an error")
    tracking.log_later(Tracking(), sent, tmp_path)
    held = tracking.held_by_run_id(Tracking(), str(sent.environment["mlflow_run"]))
    assert held is not None
    assert held.finished  # a record that was logged, of a run that failed
    assert held.run.client.get_run(held.run.run_id).info.status == "FAILED"


def test_a_description_begins_with_the_figures_that_matter() -> None:
    first = logged.note(FASTER).splitlines()[0]
    assert first == "**FASTER at least 5.85×** · 752 µs → 127 µs a step · 41.5 MiB → 48.9 MiB of memory"
    assert " to " in logged.brief(RESULTS[Verdict.INCONCLUSIVE])


def test_a_folder_that_takes_no_store_costs_one_sentence_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    begin = time.monotonic()
    with pytest.raises(TrackingError, match=r"^MLflow store sqlite:.*file/mlflow\.db: \[Errno") as caught:
        tracking.start(Tracking(uri=f"sqlite:///{tmp_path}/file/mlflow.db"), "example")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 10


def test_a_server_that_is_away_costs_one_short_sentence() -> None:
    with pytest.raises(TrackingError) as caught:
        tracking.start(Tracking(uri="http://127.0.0.1:9"), "example")  # nobody listens on the port to discard
    assert str(caught.value) == "MLflow store http://127.0.0.1:9: the server does not answer"


def test_a_server_that_is_away_is_told_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_path, "in_sweep", lambda: False)
    tracked, progress = Tracking(uri="http://127.0.0.1:9"), Progress()
    result = RESULTS[Verdict.FASTER]
    experiment = SimpleNamespace(tracking=tracked)
    session: Any = SimpleNamespace(
        experiment=experiment, result=result, output=tmp_path, watch=Stopwatch(), progress=progress
    )
    begin = time.monotonic()
    Recorder(session).start()
    assert time.monotonic() - begin < 3
    assert capsys.readouterr().err == (
        "optexp: MLflow store http://127.0.0.1:9: the server does not answer; the run goes on, its record stays, and"
        f" python -m optexp.sync {tmp_path} sends it later\n"
    )
    Recorder(session, silent).start()  # a trial's: its job has said so
    assert capsys.readouterr().err == ""


def test_a_sweep_says_once_for_its_jobs_that_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(SimpleNamespace(output=tmp_path, watch=None))  # type: ignore[arg-type]
    monkeypatch.delenv("OPTEXP_PARENT_RUN", raising=False)
    assert not recorder._told_by_sweep
    monkeypatch.setattr(search_path, "in_sweep", lambda: True)
    assert recorder._told_by_sweep
    monkeypatch.setenv("OPTEXP_PARENT_RUN", "of a store that went away later")
    assert not recorder._told_by_sweep


def test_a_data_base_that_refuses_a_run_costs_no_traceback(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "mlflow.db", tmp_path)
    run = tracking.start(Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db"), "example")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as base:
        base.execute("drop table params")
    with pytest.raises(TrackingError, match="no such table: params"):
        run.log_batch(params={"workload": "mlp"})
    assert capfd.readouterr().err == ""


def test_no_record_is_promised_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(SimpleNamespace(output=tmp_path, watch=None))  # type: ignore[arg-type]
    assert recorder._not_logged("away").endswith(f"away; python -m optexp.sync {tmp_path} sends the record later")
    monkeypatch.setattr("optexp.records.folder.LEAST_BYTES", float("inf"))
    assert recorder._not_logged("away") == "not in MLflow: away"


def test_a_full_disk_costs_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.start(Tracking(), "example")
    (tmp_path / "result.json").write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(TrackingError, match="No space left on device"):
        run.log(FASTER, tmp_path)
