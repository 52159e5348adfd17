"""A sweep is ranked from what its jobs wrote down, and its MLflow run is closed however it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from optexp.comparison import recorder
from optexp.errors import TrackingError
from optexp.reporting import tracking
from optexp.result import ByItself, Result, Verdict
from optexp.sweeps import exit_status, selection, sweep
from optexp.sweeps.corrections import name_apart

EXAMPLES = Path(__file__).parents[1] / "results"


class FakeRun:
    """Stands for an MLflow run: what was done to it, in order."""

    run_id = "0123"
    where = "mlflow ui"

    def __init__(self) -> None:
        self.done: list[Any] = []

    def log_files(self, folder: Path) -> None:
        self.done.append({str(file.relative_to(folder)) for file in folder.rglob("*.*") if file.parent.name != "jobs"})

    def log_batch(self, tags: dict[str, str]) -> None:
        self.tags = tags

    def finish(self, status: str) -> None:
        self.done.append(status)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    made = FakeRun()

    def start(node: Any, name: str, parent: str | None = None, tags: dict[str, str] | None = None) -> FakeRun:
        made.done.append((name, parent, tags))
        return made

    monkeypatch.setattr(tracking, "start", start)
    monkeypatch.setattr(sweep, "_parent", None)
    monkeypatch.delenv(sweep.PARENT, raising=False)
    return made


def config(folder: Path, *overrides: str) -> DictConfig:
    named = [f"hydra.sweep.dir={folder}"]
    hydra = {"sweep": {"dir": str(folder)}, "overrides": {"task": list(overrides), "hydra": named}}
    return OmegaConf.create({"tracking": {"enabled": True, "uri": None, "experiment": "optexp"}, "hydra": hydra})


def add_job(folder: Path, number: int, example: str | None) -> None:
    """A job's folder as Hydra prepares it; without an example the job ended before it wrote a result."""
    job = folder / str(number)
    (job / ".hydra").mkdir(parents=True)
    stack: dict[str, Any] = {"amp": {}, "fusion": {}}
    OmegaConf.save(OmegaConf.create({"strategy": stack, "device": "cpu", "seed": 0}), job / ".hydra" / "config.yaml")
    hydra = {"hydra": {"runtime": {"choices": {"workload": "gelu"}}}}
    OmegaConf.save(OmegaConf.create(hydra), job / ".hydra" / "hydra.yaml")
    if example:
        shutil.copy(EXAMPLES / f"{example}.json", job / "result.json")


def test_importing_it_is_cheap() -> None:
    slow = ("torch", "mlflow", "matplotlib", "rich")
    code = f"import optexp.sweeps.sweep, sys; sys.exit(any(name in sys.modules for name in {slow}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_jobs_nest_under_the_sweep_and_the_ranking_is_logged(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_job(tmp_path, 0, "unsupported")
    add_job(tmp_path, 1, "same")
    add_job(tmp_path, 2, "faster")
    add_job(tmp_path, 3, None)
    node = config(tmp_path, "workload=mlp,gelu", "strategy=baseline,cuda_graph", "++tracking.uri=sqlite:///x.db")
    callback = sweep.SweepCallback()

    callback.on_multirun_start(node)
    assert os.environ[sweep.PARENT] == run.run_id
    callback.on_multirun_end(node)
    assert sweep.PARENT not in os.environ

    opened, logged, status = run.done
    assert opened[0] == "workload=mlp,gelu strategy=baseline,cuda_graph"
    assert opened[2]["optexp.sweep"].startswith(opened[0])
    assert {"sweep.json", "table.csv", "report.html", "plots/speedup.png", "plots/heat_map.png"} <= logged
    assert status == "FINISHED"
    assert run.tags["optexp.verdict"] == "1 FASTER, 1 SAME, 1 UNSUPPORTED, 1 ERROR"
    assert run.tags["mlflow.note.content"].startswith("- **mlp**: cuda_graph, at least 5.85×\n- **gelu**: none of 1")

    table = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["verdict"] for row in table] == [Verdict.FASTER, Verdict.SAME, Verdict.UNSUPPORTED, Verdict.ERROR]
    assert (table[3]["workload"], table[3]["strategy"]) == ("gelu", "amp+fusion")
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1].isupper()]
    assert [line.split()[0] for line in lines[:4]] == ["FASTER", "SAME", "UNSUPPORTED", "ERROR"]


def test_a_sweep_without_a_measurement_has_no_picture(run: FakeRun, tmp_path: Path) -> None:
    add_job(tmp_path, 0, "unsupported")
    sweep.SweepCallback().on_multirun_end(config(tmp_path))
    assert (tmp_path / "sweep.json").is_file()
    assert not (tmp_path / "plots").exists()


def test_an_interrupted_sweep_ranks_what_is_done_and_is_marked_killed_once(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.SweepCallback().on_multirun_start(config(tmp_path))
    for number, example in enumerate(("same", "faster", "faster", None)):
        add_job(tmp_path, number, example)
    stopped = Result.read(tmp_path / "2" / "result.json")
    recorder.interrupted(stopped, KeyboardInterrupt("SIGTERM"), "measurement")
    stopped.write(tmp_path / "2" / "result.json")
    sweep.abort()
    sweep.abort()
    assert run.done[1:] == ["KILLED"]
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line[:1].isupper()] == ["FASTER", "SAME", "INTERRUPTED:"]
    assert f"INTERRUPTED: 2 jobs are done, in {tmp_path}; the same command with sweep.resume=true does the rest" in said
    assert [row["verdict"] for row in json.loads((tmp_path / "sweep.json").read_text())] == ["FASTER", "SAME"]
    assert sweep.PARENT not in os.environ


def test_a_store_out_of_reach_does_not_stop_a_sweep(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> FakeRun:
        raise TrackingError("MLflow store http://x: refused")

    monkeypatch.setattr(tracking, "start", refuse)
    add_job(tmp_path, 0, "faster")
    callback = sweep.SweepCallback()
    callback.on_multirun_start(config(tmp_path))
    callback.on_multirun_end(config(tmp_path))
    captured = capsys.readouterr()
    assert f"refused; python -m optexp.sync {tmp_path} sends it later, with its jobs" in captured.err
    assert "FASTER" in captured.out
    assert run.done == []


def two_stacks(folder: Path, p: float) -> None:
    """A search: the second job is its winner, and both are told apart from chance by `p` alone."""
    for number, low in enumerate((1.2, 1.5)):
        add_job(folder, number, "faster")
        result = Result.read(folder / str(number) / "result.json")
        assert result.speedup is not None
        result.speedup.low = low
        assert result.measurement is not None
        result.measurement.p_value = p
        result.notes = []
        result.config["measurement.confirm"] = True
        result.environment["mlflow_run"] = f"run {number}"
        result.write(folder / str(number) / "result.json")


class Corrections(FakeRun):
    """Stands for the MLflow runs of jobs, which have ended."""

    def reopen(self, node: Any, run_id: str) -> Corrections:
        self.done.append(run_id)
        return self

    def rename(self, name: str) -> None:
        self.done.append(name)

    def correct(self, first: Result, result: Result, folder: Path) -> None:
        self.done.append((first.verdict, result.verdict, folder.name))


@pytest.fixture
def corrections(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> Corrections:
    made = Corrections()
    monkeypatch.setattr(tracking, "reopen", made.reopen)
    return made


def test_a_winner_that_is_wrong_on_other_inputs_is_wrong_everywhere(
    corrections: Corrections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(config: DictConfig, output: Path) -> Result:
        result = Result.read(EXAMPLES / "not_equivalent.json")
        result.notes = []
        output.mkdir(parents=True)
        result.write(output / "result.json")
        return result

    two_stacks(tmp_path, p=1e-9)
    monkeypatch.setattr(sweep, "_again", again)
    (tmp_path / "1" / "samples.parquet").write_text("of the first")
    sweep.SweepCallback().on_multirun_end(config(tmp_path))
    exit_status.ExitStatus().on_multirun_end(config(tmp_path))
    assert exit_status.status() == 3
    found = Result.read(tmp_path / "1" / "result.json")
    assert (found.verdict, found.speedup) == (Verdict.NOT_EQUIVALENT, None)
    assert found.by_itself == ByItself(Verdict.FASTER, "", "../winners/0")
    assert "NOT_EQUIVALENT" in (tmp_path / "1" / "report.html").read_text()
    assert Result.read(tmp_path / "1" / "by_itself" / "result.json").verdict is Verdict.FASTER
    assert not (tmp_path / "1" / "samples.parquet").exists()
    assert corrections.done == ["run 1", (Verdict.FASTER, Verdict.NOT_EQUIVALENT, "1")]


@pytest.mark.parametrize("asked", ["faster", "verified"])
def test_a_claim_that_is_lost_among_many_is_lost_in_its_record(
    asked: str, corrections: Corrections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_stacks(tmp_path, p=0.009)
    for number in "01":
        (tmp_path / number / "optimized.patch").write_text("of a claim")
        found = Result.read(tmp_path / number / "result.json")
        found.config["patch"] = asked
        found.notes.append("optimized.patch puts amp into net.py")
        found.write(tmp_path / number / "result.json")
    monkeypatch.setattr(selection, "confirm", lambda results, folder, run: dict(results))
    sweep.SweepCallback().on_multirun_end(config(tmp_path))
    exit_status.ExitStatus().on_multirun_end(config(tmp_path))
    assert exit_status.status() == 0
    for number in "01":
        found = Result.read(tmp_path / number / "result.json")
        assert (tmp_path / number / "optimized.patch").exists() == (asked == "verified")
        assert any(note.startswith("optimized.patch") for note in found.notes) == (asked == "verified")
        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.by_itself.verdict is Verdict.FASTER
        assert found.by_itself.headline.startswith("FASTER")
    assert [said for said in corrections.done if isinstance(said, str)] == ["run 0", "run 1"]


def test_runs_that_differ_by_a_setting_are_called_by_it(corrections: Corrections, tmp_path: Path) -> None:
    """That of a winner which was measured again, too."""
    firsts = [Result.read(EXAMPLES / "faster.json") for _ in range(2)]
    for number, result in enumerate(firsts):
        result.config["workload.size"] = 64 << number
        result.environment["mlflow_run"] = f"run {number}"
    again = replace(firsts[1], environment={"mlflow_run": "run 2"})
    name_apart(config(tmp_path), firsts, [firsts[0], again])
    small, large = (f"{again.workload} size={size} · {again.label}" for size in (64, 128))
    assert corrections.done == ["run 0", small, "run 1", large, "run 2", large]


def test_runs_that_differ_by_their_stacks_alone_keep_their_names(corrections: Corrections, tmp_path: Path) -> None:
    faster = Result.read(EXAMPLES / "faster.json")
    results = [replace(faster, strategy=stack, environment={"mlflow_run": stack[0]}) for stack in (["amp"], ["fusion"])]
    name_apart(config(tmp_path), results, results)
    assert corrections.done == []


def test_without_tracking_nothing_is_opened(run: FakeRun, tmp_path: Path) -> None:
    node = config(tmp_path)
    node.tracking.enabled = False
    sweep.SweepCallback().on_multirun_start(node)
    assert run.done == []
