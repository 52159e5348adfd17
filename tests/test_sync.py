"""Records that a store does not have are sent once, under their sweep, and completed or corrected where it has less."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from omegaconf import OmegaConf

from optexp.commands import sync
from optexp.records import filenames
from optexp.reporting import logged, mlflow_store, tracking
from optexp.result import Result, Verdict
from optexp.sweeps import sweep

RESULTS = {path.stem: Result.read(path) for path in (Path(__file__).parent / "results").glob("*.json")}
MEASURED_BY = {**RESULTS["faster"].environment, "optexp_git": {"commit": "c0ffee", "dirty": False}}
JOBS = [replace(RESULTS["faster"], id=f"record {n}", environment=MEASURED_BY) for n in range(3)]
BEGUN_S = 1_790_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store: making one takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    tracking.start(mlflow_store.Store(uri), "first").finish()
    return uri


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    """A name of its own for each test."""
    return str(request.node.name)


def written(result: Result, folder: Path) -> Path:
    folder.mkdir(parents=True)
    result.write(folder / "result.json")
    return folder


def swept(folder: Path) -> Path:
    """A sweep of three jobs, the last with two trials, a job that was never built, and a record that was replaced."""
    for number, job in enumerate(JOBS):
        written(job, folder / str(number))
    for number in (1, 2):
        written(replace(JOBS[0], id=f"trial {number}"), folder / "2" / "trials" / str(number))
    written(replace(JOBS[0], id="", fingerprint=""), folder / "3")
    written(JOBS[0], folder / "1" / "by_itself")
    node = {"hydra": {"overrides": {"task": ["workload=mlp,gelu"]}}}
    OmegaConf.save(OmegaConf.create(node), folder / sync.SWEEP)
    sweep.record(JOBS, folder)
    (folder / filenames.SWEEP_PAGE).write_text("the best")
    os.utime(folder / sync.SWEEP, (BEGUN_S, BEGUN_S))
    os.utime(folder / filenames.RANKING, (BEGUN_S + 60, BEGUN_S + 60))
    return folder


def runs(store: str, experiment: str) -> dict[str, list]:  # type: ignore[type-arg]
    """Runs by the id of their parent."""
    client = MlflowClient(store)
    found = client.get_experiment_by_name(experiment)
    assert found
    by_parent: dict[str, list] = {}  # type: ignore[type-arg]
    for run in client.search_runs([found.experiment_id]):
        by_parent.setdefault(run.data.tags.get(tracking.PARENT, ""), []).append(run)
    return by_parent


def test_a_sweep_is_sent_once(store: str, experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, options = swept(tmp_path / "sweep"), ["--store", store, "--experiment", experiment]
    assert sync.main([str(folder), *options]) == 0
    assert capsys.readouterr().out == "6 records: 5 sent, 1 of jobs that were never built\n"
    found = runs(store, experiment)
    (parent,) = found[""]
    assert parent.data.tags["mlflow.note.content"] == "the best"
    assert parent.data.tags["optexp.verdict"] == "3 FASTER"
    assert (parent.info.start_time, parent.info.end_time) == (1000 * BEGUN_S, 1000 * (BEGUN_S + 60))
    assert {run.data.tags["mlflow.source.git.commit"] for run in found[parent.info.run_id]} == {"c0ffee"}
    jobs = {run.data.tags[tracking.RECORD]: run for run in found[parent.info.run_id]}
    assert jobs.keys() == {job.id for job in JOBS}
    assert all(run.info.status == "FINISHED" and run.data.metrics["speedup/low"] > 1 for run in jobs.values())
    assert len(found[jobs["record 2"].info.run_id]) == 2

    assert sync.main([str(folder), *options]) == 0
    assert capsys.readouterr().out == "6 records: 5 there already, 1 of jobs that were never built\n"
    assert sum(map(len, runs(store, experiment).values())) == 6


def test_a_run_that_was_cut_short_is_completed_and_one_that_says_otherwise_is_corrected(
    store: str, experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = mlflow_store.Store(store, experiment)
    cut = tracking.start(node, "cut short", tags={tracking.RECORD: JOBS[0].id})
    cut.log_batch(logged.metrics(JOBS[0]))
    first = tracking.start(node, "corrected later", tags={tracking.RECORD: JOBS[1].id})
    first.log(JOBS[1], tmp_path)
    first.finish()
    written(JOBS[0], tmp_path / "0")
    written(replace(RESULTS["not_equivalent"], id=JOBS[1].id), tmp_path / "1")
    assert sync.main([str(tmp_path), "--store", store, "--experiment", experiment]) == 0
    assert capsys.readouterr().out == "2 records: 1 sent, 1 corrected\n"
    found = {run.info.run_id: run for run in runs(store, experiment)[""]}
    assert found[cut.run_id].data.tags.items() >= logged.tags(JOBS[0]).items()
    assert found[cut.run_id].info.status == "FINISHED"
    assert found[first.run_id].data.tags["optexp.verdict"] == Verdict.NOT_EQUIVALENT
    assert found[first.run_id].data.metrics["speedup/low"] != found[cut.run_id].data.metrics["speedup/low"]
    assert len(found) == 2


def test_a_store_that_is_away_costs_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    written(JOBS[0], tmp_path / "0")
    assert sync.main([str(tmp_path), "--store", f"sqlite:///{tmp_path}/file/mlflow.db"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.endswith("run the same command again\n")
    assert said.out == "1 record: none sent\n"
    assert sync.main([str(tmp_path / "nothing")]) == 1
