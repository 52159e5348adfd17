"""The command as a user types it: verdicts, exit statuses, records, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optexp.commands import audit
from optexp.result import Result, Verdict

OUTSIDE = Path(__file__).parent / "outside"
TINY = ["workload.dim=16", "workload.layers=2", "workload.batch_size=8", "measurement=quick", "device=cpu"]
# A program against itself on a machine shared with others: a few percent between processes are that machine's.
COARSE = "measurement.min_effect=0.2"
BRIEF = ["measurement.warmup_s=0.1", "measurement.pairs=10", "measurement.process_s=1", "profile.details=false"]
CHECKOUT = Path(__file__).parent.parent


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "optexp", *arguments]


def variables() -> dict[str, str]:
    paths = [str(CHECKOUT), str(OUTSIDE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "COLUMNS": "160"}


def optexp(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, env=variables(), capture_output=True, text=True, timeout=280)


def results(folder: Path) -> list[Result]:
    """What the jobs wrote, MLflow's copies aside."""
    paths = [path for kind in ("outputs", "multirun") for path in sorted((folder / kind).rglob("result.json"))]
    assert not paths or audit.main(list(map(str, paths))) == 0
    return [Result.read(path) for path in paths]


def test_one_comparison_leaves_its_whole_record(tmp_path: Path) -> None:
    done = optexp(tmp_path, "workload=mlp", "strategy=baseline", *TINY, *BRIEF[:3], COARSE, "horizon_steps=1000")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = results(tmp_path)
    assert result.verdict in (Verdict.SAME, Verdict.INCONCLUSIVE)
    assert result.speedup is not None
    assert result.speedup.low <= result.speedup.estimate <= result.speedup.high
    assert result.verdict in done.stdout
    folder = next((tmp_path / "outputs").rglob("result.json")).parent
    for artifact in ("report.html", "config.yaml", "environment.json", "samples.parquet", "traces/baseline.json.gz"):
        assert (folder / artifact).stat().st_size > 0
    assert "\x1b" not in done.stdout + done.stderr  # not a terminal: plain lines


def test_a_strategy_that_cannot_apply_says_so_in_one_line(tmp_path: Path) -> None:
    done = optexp(tmp_path, "workload=mlp", "strategy=cuda_graph", "tracking.enabled=false", *TINY)
    assert done.returncode == 4
    sentence, report = filter(None, done.stdout.splitlines())
    assert "UNSUPPORTED" in sentence
    assert "device=cuda" in sentence
    assert report.split()[0] == "report"
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_whatever_a_job_does_the_next_one_runs(tmp_path: Path) -> None:
    """A crash, a hang, an exit, a wrong result; then an honest one. Strategies come from outside the repository."""
    done = optexp(
        tmp_path,
        "-m",
        "workload=mlp",
        "strategy=segfault,hang,leave,wrong,baseline",
        f"hydra.searchpath=[file://{OUTSIDE / 'conf'}]",
        "timeout_s=10",
        "verify=only",
        *TINY,
    )
    found = {result.label: result for result in results(tmp_path)}
    assert len(found) == 5, done.stdout + done.stderr
    assert [found[name].verdict for name in ("segfault", "hang", "leave")] == [Verdict.ERROR] * 3
    assert "SIGSEGV" in found["segfault"].headline
    assert "10 s" in found["hang"].headline
    assert "exit code 7" in found["leave"].headline
    assert found["wrong"].verdict is Verdict.NOT_EQUIVALENT
    assert found["wrong"].speedup is None
    assert found["baseline"].verdict is Verdict.VERIFIED
    assert done.returncode == 1
    assert_nested(tmp_path, children=5)


@pytest.mark.slow
def test_a_workload_from_outside_the_repository(tmp_path: Path) -> None:
    place = f"hydra.searchpath=[file://{OUTSIDE / 'conf'}]"
    done = optexp(tmp_path, "workload=doubling", "workload.size=500", "strategy=fusion", place, *TINY[3:])
    (result,) = results(tmp_path)
    assert result.verdict.measured, done.stdout + done.stderr
    assert (result.workload, result.config["workload.size"]) == ("doubling", 500)


@pytest.mark.slow
def test_the_sweep_of_the_readme(tmp_path: Path) -> None:
    """Stacks beside single strategies; an option applies where its strategy is. Nothing waits for a C++ compiler."""
    fused = "amp+fusion[backend=aot_eager]"
    done = optexp(
        tmp_path,
        "-m",
        "workload=mlp",
        "strategy=inplace,[amp,fusion],cuda_graph",
        "strategy.fusion.backend=aot_eager",
        *TINY,
        *BRIEF,
    )
    found = {result.label: result for result in results(tmp_path)}
    assert set(found) == {"inplace", fused, "cuda_graph"}, done.stdout + done.stderr
    assert found["inplace"].verdict is Verdict.NOT_ENGAGED  # backward needs what could be overwritten
    assert found[fused].verdict.measured, found[fused].headline
    assert "bfloat16" in found[fused].equivalence.contract
    assert found["cuda_graph"].verdict is Verdict.UNSUPPORTED
    assert any("fusion" in note for note in found["cuda_graph"].notes)
    assert done.returncode == 4
    assert done.stdout.rstrip().count(fused) >= 2  # its own verdict, and a row of the ranked table


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupting_ends_everything_and_marks_the_run_killed(tmp_path: Path, stop: signal.Signals) -> None:
    process = subprocess.Popen(
        command("workload=mlp", "strategy=baseline", *TINY, "measurement.pairs=100000", "measurement.process_s=600"),
        cwd=tmp_path,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(stop, signal.SIG_DFL),  # ignored where a shell runs these tests aside
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("measurement"):
            break
    time.sleep(1.0)
    started = descendants(process.pid)
    assert started
    for _ in range(4):  # people press Ctrl-C again while the run is being ended
        process.send_signal(stop)
        time.sleep(0.1)
    assert process.wait(timeout=20) == 130
    assert "Traceback" not in process.stderr.read()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
    assert [run.info.status for run in mlflow_runs(tmp_path)] == ["KILLED"]
    (result,) = results(tmp_path)
    assert result.headline == f"ERROR: interrupted ({stop.name}) during measurement"


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, whatever its session."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, frontier = [], [pid]
    while frontier:
        above = frontier.pop()
        children = [child for child, parent in parents.items() if parent == above]
        found += children
        frontier += children
    return found


def mlflow_runs(folder: Path) -> list:  # type: ignore[type-arg]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def assert_nested(folder: Path, children: int) -> None:
    """The sweep is one parent run with its comparisons below it."""
    runs = mlflow_runs(folder)
    below = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(below) == children
    assert {run.data.tags["mlflow.parentRunId"] for run in below} == {parent.info.run_id}
    failed = {run.info.run_id for run in below if run.data.tags["optexp.verdict"] == "ERROR"}
    assert all(run.info.status == ("FAILED" if run.info.run_id in failed else "FINISHED") for run in runs)
