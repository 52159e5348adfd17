"""Real sweeps on real engines: a worker is killed in mid-sweep, and every job has one record at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from optexp.result import Result, Verdict
from optexp.support.descent import descendants
from optexp.support.pausing import is_paused
from optexp.sweeps.job import MARK

SIZES = [64, 65, 66, 67]
SWEEP = [
    sys.executable, "-m", "optexp", "-m", "workload=gelu", f"workload.size={','.join(map(str, SIZES))}",
    "strategy=inplace", "verify=only", "measurement=quick", "device=cpu",
]  # fmt: skip
ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def begin(folder: Path, *more: str, log: str = "log") -> subprocess.Popen[bytes]:
    with open(folder / log, "w") as printed:
        return subprocess.Popen([*SWEEP, *more], cwd=folder, env=environment(), stdout=printed, stderr=printed)


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def workers(words: str) -> list[int]:
    """Processes of this machine whose command line has these words."""
    found = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split() if int(line) != os.getpid()]


def open_runs(folder: Path) -> list[Path]:
    """Comparisons in progress: each has opened its run in MLflow."""
    return list(folder.glob("multirun/*/*/[0-9]/.mlflow_run"))


def check_complete(folder: Path, killed: int = 0, store: str = "", experiment: str = "optexp") -> None:
    records = [Result.read(path) for path in folder.glob("multirun/*/*/[0-9]*/result.json")]
    assert sorted(record.config["workload.size"] for record in records) == SIZES, (folder / "log").read_text()
    assert {record.verdict for record in records} == {Verdict.VERIFIED}
    assert len(json.loads(next(folder.glob("multirun/*/*/sweep.json")).read_text())) == len(SIZES)
    client = MlflowClient(store or f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    parent = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parent] == ["FINISHED"]
    states = Counter(run.info.status for run in runs if run not in parent)
    assert states == Counter({"FINISHED": len(SIZES), **({"KILLED": killed} if killed else {})})


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_goes_on_is_complete(tmp_path: Path) -> None:
    first = begin(tmp_path)
    until(lambda: len([*tmp_path.glob(f"multirun/*/*/*/{MARK}")]) == 1)
    until(lambda: open_runs(tmp_path))
    first.kill()
    first.wait()
    killed = len(open_runs(tmp_path))
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"multirun/*/*/*/{MARK}")}
    assert 0 < len(done) < len(SIZES)
    assert begin(tmp_path, "sweep.resume=true", log="second").wait(200) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    check_complete(tmp_path, killed)


@pytest.mark.slow
def test_joblib_survives_a_worker_that_is_killed(tmp_path: Path) -> None:
    sweep = begin(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    until(lambda: len(open_runs(tmp_path)) == 2)
    mine = [pid for pid in workers("LokyProcess") if Path(f"/proc/{pid}/cwd").resolve() == tmp_path.resolve()]
    os.kill(mine[0], signal.SIGKILL)
    assert sweep.wait(200) == 0
    check_complete(tmp_path, killed=1)
    assert "ended without a record: started again" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compare", "profile"])
def test_joblib_pauses_the_others_while_a_job_is_timed(tmp_path: Path, mode: str) -> None:
    words = ["-m", "workload=gelu", "workload.size=64,96,128", "device=cpu", "measurement=quick", f"mode={mode}"]
    words += ["strategy=inplace"] * (mode == "compare")
    short = ["measurement.pairs=10", "measurement.process_s=0.5", "measurement.warmup_s=0.5", "measurement.load_s=0"]
    engine = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "tracking.enabled=false"]
    done = subprocess.run(
        [sys.executable, "-m", "optexp", *words, *short, *engine],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = [Result.read(path) for path in tmp_path.glob("multirun/*/*/*/result.json")]
    assert len(records) == 3
    assert any(record.seconds.get("wait") for record in records)
    assert all("other comparisons shared the device" in str(record.notes) for record in records)


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_paused_worker_behind(tmp_path: Path) -> None:
    words = ["-m", "workload=gelu", "workload.size=64,96,128,160", "device=cpu", "measurement=quick"]
    engine = ["strategy=inplace", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "tracking.enabled=false"]
    with open(tmp_path / "log", "w") as log:
        sweep = subprocess.Popen(
            [sys.executable, "-m", "optexp", *words, *engine],
            cwd=tmp_path, env=environment(), stdout=log, stderr=log,
        )  # fmt: skip
    until(lambda: any(is_paused(pid) for pid in descendants(sweep.pid)))
    started = descendants(sweep.pid)
    sweep.kill()
    sweep.wait()
    until(lambda: not [pid for pid in started if Path(f"/proc/{pid}").exists()], 30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Two nodes on this machine; the second one can be killed."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    from ray.cluster_utils import Cluster  # ray's own tests start nodes by it

    variables = {"RAY_worker_niceness": "0"}
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "env_vars": variables}
    )
    nodes.add_node(num_cpus=1, env_vars=variables)
    yield nodes.address
    nodes.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_ray_survives_a_worker_that_is_killed(tmp_path: Path, cluster: str) -> None:
    sweep = begin(tmp_path, "hydra/launcher=ray", f"hydra.launcher.address={cluster}")
    until(lambda: len(open_runs(tmp_path)) == 2)
    os.kill(workers("ray::work_anywhere")[0], signal.SIGKILL)
    assert sweep.wait(200) == 0
    check_complete(tmp_path, killed=1)


@pytest.mark.slow
@pytest.mark.slurm
def test_slurm_survives_a_worker_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra [slurm] is not installed")
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("SLURM does not run here")
    sweep = begin(tmp_path, "hydra/launcher=slurm", "hydra.launcher.array_parallelism=1")
    until(lambda: open_runs(tmp_path))
    mine = [
        pid for pid in workers("submitit.core._submit") if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    python = [pid for pid in mine if "python" in os.readlink(f"/proc/{pid}/exe")]
    os.kill(python[0], signal.SIGKILL)
    assert sweep.wait(280) == 0
    check_complete(tmp_path, killed=1)


@pytest.mark.slow
@pytest.mark.postgres
def test_workers_share_a_store_in_postgresql(tmp_path: Path) -> None:
    store = os.environ.get("OPTEXP_TEST_POSTGRES")
    if store is None:
        pytest.skip("OPTEXP_TEST_POSTGRES names no data base: postgresql+psycopg2://user:password@host/database")
    experiment = f"test {time.time_ns()}"
    more = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"tracking.uri='{store}'"]
    sweep = begin(tmp_path, *more, f"tracking.experiment='{experiment}'")
    until(lambda: len(open_runs(tmp_path)) == 2)
    mine = [pid for pid in workers("LokyProcess") if Path(f"/proc/{pid}/cwd").resolve() == tmp_path.resolve()]
    os.kill(mine[0], signal.SIGKILL)
    assert sweep.wait(200) == 0
    check_complete(tmp_path, killed=1, store=store, experiment=experiment)
