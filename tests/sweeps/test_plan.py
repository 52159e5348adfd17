"""A plan says what a sweep will take, from the records of earlier jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optexp.comparison import forecast
from optexp.measurement.machine_load import MachineLoad
from optexp.sweeps import plan
from optexp.sweeps.job import Job
from optexp.sweeps.plan import Cost, Past
from tests.sweeps.engines import sweep_config


@pytest.fixture
def made(experiment: Any) -> Any:
    return experiment("workload=gelu", "strategy=inplace", "device=cpu")


def past(made: Any, seconds: float, **changes: Any) -> Past:
    return Past({**json.loads(json.dumps(made.resolved, default=str)), "device": "cpu", **changes}, seconds)


def test_the_most_similar_records_count(made: Any) -> None:
    same = [past(made, seconds) for seconds in (10.0, 12.0, 50.0)]
    other_size = past(made, 20.0, **{"workload.size": 7, "workload.approximate": "tanh", "dtype": "float16"})
    other_stack = past(made, 30.0, strategy="fusion")
    other_workload = past(made, 40.0, workload="mlp")
    other_preset = past(made, 1000.0, measurement="rigorous")
    records = [other_preset, other_workload, other_stack, other_size, *same]
    assert plan.expected(made, records) == (12.0, "3 records of the same job")
    assert plan.expected(made, records[:4]) == (20.0, "1 record of this stack and workload")
    assert plan.expected(made, records[:3]) == (30.0, "1 record of this workload")
    assert plan.expected(made, records[:2]) == (40.0, "1 record of other workloads")


def test_without_a_record_the_preset_tells(made: Any, experiment: Any) -> None:
    seconds, basis = plan.expected(made, [])
    assert seconds == made.measurement.budget_s + forecast.BESIDE_S
    assert basis == "no record: the preset's time budget"
    assert plan.expected(experiment("verify=only"), [])[1] == "no record: a guess"
    searching = experiment("mode=auto", "auto.budget=5m")
    assert plan.expected(searching, [])[0] == 300
    apart = experiment("mode=ablate", "strategy=[amp,fusion,inplace]")
    assert plan.expected(apart, [])[0] == 7 * seconds


def test_the_sum_counts_wall_time_and_gpu_hours(tmp_path: Path) -> None:
    job = Job(0, sweep_config(tmp_path), tmp_path, "")
    found = [Cost(job, "gelu", 1800.0, "", on_gpu) for on_gpu in (True, True, False)]
    assert plan.summary(found, 0, 1) == "3 jobs: about 90 min and 1 GPU-hours"
    assert plan.summary(found, 2, 8) == "3 jobs, 8 side by side: about 30 min and 1 GPU-hours; 2 more are done already"
    assert plan.summary(found[2:], 0, 1) == "1 job: about 30 min"
    assert plan.summary([], 3, 1) == "no job to run: 3 are done already"


def test_a_sweep_says_before_its_first_job_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(0, sweep_config(tmp_path), tmp_path, "")
    found = [Cost(job, "gelu", 40.0, basis, False) for basis in ("no record: a guess", "1 record", "1 record")]
    monkeypatch.setattr(plan, "costs", lambda *_: found)
    monkeypatch.chdir(tmp_path)
    plan.announce([job], 0, 1, MachineLoad(0.0, 2))
    plan.announce([job], 4, 2, MachineLoad(9.0, 2))
    assert capsys.readouterr().err.splitlines() == [
        "optexp: 3 jobs, about 2 min (1 record); sweep.plan=true lists them",
        "optexp: 3 jobs, 2 side by side, about 3 min (1 record); the machine is busy: 9.0 processes share 2 cores;"
        " 4 more are done already; sweep.plan=true lists them",
    ]


def test_earlier_records_are_read_without_their_waits(tmp_path: Path) -> None:
    folder = tmp_path / "multirun" / "day" / "time" / "0"
    folder.mkdir(parents=True)
    record = {"verdict": "SAME", "config": {"mode": "compare"}, "seconds": {"wait": 100.0, "total": 130.0}}
    (folder / "result.json").write_text(json.dumps(record))
    for name, text in (("1", "{"), ("2", json.dumps({**record, "verdict": "ERROR"}))):
        (folder.parent / name).mkdir()
        (folder.parent / name / "result.json").write_text(text)
    assert list(plan.history(tmp_path)) == [Past({"mode": "compare"}, 30.0)]
