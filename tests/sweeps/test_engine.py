"""Every job of a sweep ends in a record, whatever its engine's workers do, and none is run twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from optexp.config import search_path
from optexp.errors import ConfigError
from optexp.reporting import tracking
from optexp.result import Result, Verdict
from optexp.sweeps import job as jobs_module
from optexp.sweeps import resume, sweep
from optexp.sweeps.job import MARK, Job, Surroundings, pack, unpack, work_anywhere
from tests.sweeps.engines import Recorded, end, sweep_config

THREE = [["seed=0"], ["seed=1"], ["seed=2"]]


@pytest.fixture(autouse=True)
def _forget_jobs() -> Iterator[None]:
    yield
    sweep._expected.clear()


def nothing(job: Job, start: int) -> None:
    """A worker that is killed before it leaves a record."""


def test_a_job_whose_worker_was_killed_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Recorded(sweep_config(tmp_path), lambda job, start: end(job) if job.number != 1 or start > 1 else None)
    engine.launch(THREE, 0)
    assert engine.starts == {0: 1, 1: 2, 2: 1}
    assert [result.verdict for result in sweep.read(tmp_path).values()] == [Verdict.FASTER] * 3
    captured = capsys.readouterr()
    assert "job 1 ended without a record: started again" in captured.err
    assert captured.out.splitlines()[-1].startswith("[3/3] ")


def test_a_job_that_kills_each_worker_is_an_error_and_stops_no_other(tmp_path: Path) -> None:
    engine = Recorded(sweep_config(tmp_path, attempts=3), lambda job, start: None if job.number == 0 else end(job))
    engine.launch(THREE, 0)
    assert engine.starts == {0: 3, 1: 1, 2: 1}
    verdicts = [result.verdict for result in sweep.read(tmp_path).values()]
    assert verdicts == [Verdict.ERROR, Verdict.FASTER, Verdict.FASTER]


def test_a_sweep_that_goes_on_runs_what_is_left(tmp_path: Path) -> None:
    killed = Recorded(sweep_config(tmp_path), lambda job, start: end(job) if job.number == 1 else None)
    killed.launch(THREE, 0)
    goes_on = Recorded(sweep_config(tmp_path, resume=True))
    goes_on.launch(THREE, 0)
    assert goes_on.starts == {0: 1, 2: 1}
    assert goes_on.folders == [tmp_path / str(number) for number in range(3)]
    complete = Recorded(sweep_config(tmp_path, resume=True))
    complete.launch(THREE, 0)
    assert not complete.starts
    assert len(sweep.read(tmp_path)) == 3


def test_an_error_is_run_again_by_a_sweep_that_goes_on(tmp_path: Path) -> None:
    Recorded(sweep_config(tmp_path), lambda job, start: end(job, "error" if job.number else "faster")).launch(THREE, 0)
    goes_on = Recorded(sweep_config(tmp_path, resume=True))
    goes_on.launch(THREE, 0)
    assert goes_on.starts == {1: 1, 2: 1}


def test_without_resume_every_job_is_run(tmp_path: Path) -> None:
    Recorded(sweep_config(tmp_path)).launch(THREE, 0)
    again = Recorded(sweep_config(tmp_path))
    again.launch(THREE, 0)
    assert again.starts == {0: 1, 1: 1, 2: 1}


def test_jobs_that_are_added_take_folders_that_are_free(tmp_path: Path) -> None:
    Recorded(sweep_config(tmp_path)).launch(THREE, 0)
    wider = Recorded(sweep_config(tmp_path, resume=True))
    wider.launch([["seed=7"], *THREE], 0)
    assert wider.starts == {4: 1}
    assert [folder.name for folder in wider.folders] == ["4", "0", "1", "2"]
    assert len(sweep.read(tmp_path)) == 4


def test_batches_share_no_folder(tmp_path: Path) -> None:
    Recorded(sweep_config(tmp_path)).launch([["seed=0"]], 0)
    wider = Recorded(sweep_config(tmp_path, resume=True))
    wider.launch([["seed=5"], ["seed=0"]], 0)
    wider.launch([["seed=6"], ["seed=7"]], 2)
    assert len(wider.starts) == 3
    assert set(wider.starts.values()) == {1}
    assert len(sweep.read(tmp_path)) == 4


def test_settings_are_compared_and_where_a_run_is_recorded_is_not(tmp_path: Path) -> None:
    plain = sweep_config(tmp_path)
    elsewhere = OmegaConf.merge(plain, {"tracking": {"uri": "http://x"}, "sweep": {"resume": True}})
    assert resume.key(elsewhere) == resume.key(plain)
    assert resume.key(OmegaConf.merge(plain, {"seed": 1})) != resume.key(plain)
    assert resume.key(OmegaConf.merge(plain, {"study": {"step": "a"}})) != resume.key(plain)


@pytest.mark.parametrize("value", ["model.py", "model:Net", "model.Net"])
def test_the_users_code_is_compared(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = OmegaConf.merge(sweep_config(tmp_path), {"workload": {"path": value}})
    (tmp_path / "model.py").write_text("a = 1")
    before = resume.key(config)
    (tmp_path / "model.py").write_text("a = 2")
    assert resume.key(config) != before


def test_a_record_that_is_cut_short_is_no_record(tmp_path: Path) -> None:
    engine = Recorded(sweep_config(tmp_path))
    engine.launch(THREE, 0)
    (tmp_path / "0" / "result.json").write_text('{"verdict": "FAS')
    (tmp_path / "1" / MARK).unlink()
    assert [folder.name for folder in resume.finished(tmp_path).values()] == ["2"]


def test_a_record_of_another_gpu_is_run_again_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded(sweep_config(tmp_path)).launch(THREE[:1], 0)
    result = Result.read(tmp_path / "0" / "result.json")
    result.environment["gpu"] = "H100"
    result.write(tmp_path / "0" / "result.json")
    for here, kept in ((set(), 1), ({"H100"}, 1), ({"A100"}, 0)):
        monkeypatch.setattr(resume, "_gpus", lambda here=here: frozenset(here))
        assert len(resume.finished(tmp_path)) == kept


def test_the_earlier_sweep_is_that_of_the_same_overrides(tmp_path: Path) -> None:
    def config(time: str, *task: str, typed: str = "") -> Any:
        made = sweep_config(tmp_path / "2026-01-01" / time)
        made.hydra.overrides = {"task": list(task), "hydra": [typed] if typed else []}
        return made

    for time, seed in (("10", "seed=0,1"), ("11", "seed=0,1"), ("12", "seed=5,6")):
        made = config(time, seed)
        Path(made.hydra.sweep.dir).mkdir(parents=True)
        path = Path(made.hydra.sweep.dir) / "multirun.yaml"
        OmegaConf.save(made, path)
        os.utime(path, (int(time), int(time)))
    now = config("13", "seed=0,1", "++sweep.resume=true")
    assert resume.earlier_folder(now) == tmp_path / "2026-01-01" / "11"
    assert resume.earlier_folder(config("13", "seed=9")) is None
    named = config("12", "seed=0,1", typed="hydra.sweep.dir=x")
    assert resume.earlier_folder(named) == tmp_path / "2026-01-01" / "12"


def test_plan_runs_nothing_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("optexp.sweeps.plan.show", lambda jobs, *rest: shown.append((len(jobs), *rest)))
    engine = Recorded(sweep_config(tmp_path / "new", plan=True))
    engine.launch(THREE, 0)
    assert shown == [(3, 0, 1, torch.cuda.is_available())]
    assert not engine.starts
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("setting", [{"resum": True}, {"plan": "maybe"}, {"attempts": 0}])
def test_a_misspelt_setting_of_the_sweep_is_a_mistake(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sweep"):
        Recorded(sweep_config(tmp_path, **setting)).launch(THREE, 0)


def test_settings_of_a_sweep_are_refused_in_a_single_run(experiment: Any) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.plan=true is for a sweep: add -m"):
        experiment("sweep.plan=true")


def test_a_machine_without_the_folder_sends_the_record_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not log it into a file of its own."""
    seen = []

    def work(job: Job, surroundings: Surroundings) -> None:
        seen.append((job.config.tracking.enabled, job.config.hydra.sweep.dir))
        end(job)

    monkeypatch.setattr(jobs_module, "work", work)
    config = sweep_config(tmp_path / "absent")
    config.tracking.enabled, config.hydra.job.num = True, 3
    job = Job(3, config, tmp_path / "absent" / "3", "key")
    packed = work_anywhere(job, Surroundings(os.getcwd(), (), {}))
    assert not job.folder.exists()
    assert seen[0][0] is False
    assert seen[0][1] != str(tmp_path / "absent")
    unpack(packed, job.folder)
    assert job.record().verdict is Verdict.FASTER
    assert work_anywhere(job, Surroundings(os.getcwd(), (), {})) is None
    assert seen[1] == (True, str(tmp_path / "absent"))


def test_packed_files_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "traces").mkdir(parents=True)
    (tmp_path / "a" / "traces" / "x.json").write_text("x")
    unpack(pack(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "b" / "traces" / "x.json").read_text() == "x"


class Client:
    """Stands for an MLflow run that was left open."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def finish(self, status: str) -> None:
        self.ended.append(status)


def test_the_run_of_a_killed_worker_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(tracking, "reopen", lambda config, run_id: client)
    engine = Recorded(
        sweep_config(tmp_path), lambda job, start: (job.write_config(), (job.folder / tracking.OPEN).write_text("run"))
    )
    engine.launch(THREE[:1], 0)
    assert client.ended == ["KILLED"]
    assert not (tmp_path / "0" / tracking.OPEN).exists()


def test_what_workers_could_not_log_the_sweep_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    monkeypatch.setattr(sweep, "parent_run_id", lambda: "parent")
    monkeypatch.setattr(
        tracking, "log_later", lambda node, result, folder, parent: logged.append((folder.name, parent))
    )

    def behave(job: Job, start: int) -> None:
        end(job)
        path = job.folder / "result.json"
        record = json.loads(path.read_text())
        record["config"] = record["config"] or {"seed": 0}
        record["environment"] = {"mlflow_run": "there"} if job.number == 1 else {}
        path.write_text(json.dumps(record))

    Recorded(sweep_config(tmp_path), behave).launch(THREE, 0)
    assert logged == [("0", "parent"), ("2", "parent")]


def test_launchers_are_choices() -> None:
    assert {"basic", "joblib", "ray", "slurm"} <= {*search_path.options("hydra/launcher")}
    assert {"steps", "optuna"} <= {*search_path.options("hydra/sweeper")}


def test_equal_jobs_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again, twice = [*THREE, ["seed=1"]], Recorded(sweep_config(tmp_path))
    twice.launch(again, 0)
    assert twice.starts == {0: 1, 1: 1, 2: 1}
    assert [folder.name for folder in twice.folders] == ["0", "1", "2", "1"]
    assert "optexp: 1 job is the same as another: run once" in capsys.readouterr().err
    resumed = Recorded(sweep_config(tmp_path, resume=True))
    resumed.launch([*again, ["seed=3"], ["seed=3"]], 0)
    assert list(resumed.starts.values()) == [1]
    shown = capsys.readouterr().err
    assert "optexp: 2 jobs are the same as others: run once" in shown
    assert "optexp: done already: 3; left: 1" in shown
