"""Real stores, real processes: eight writers on one SQLite file, PostgreSQL, a server that is killed in mid-sweep."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from mlflow import MlflowClient

from optexp.commands import ui
from optexp.errors import TrackingError
from optexp.reporting import logged, mlflow_store, tracking
from optexp.result import Result

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "results" / "faster.json"
WRITERS, RUNS = 8, 6  # of each
pytestmark = pytest.mark.slow


def write(uri: str, writer: int) -> None:
    """A process that logs several comparisons, as a worker does."""
    result = Result.read(RECORD)
    for number in range(RUNS):
        key = f"{writer}.{number}"
        run = tracking.start(mlflow_store.Store(uri), key, tags={tracking.RECORD: key})
        run.log(result, RECORD.parent)
        run.finish()


def runs(uri: str, name: str = "optexp") -> list[Any]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(name)
    assert experiment
    return list(client.search_runs([experiment.experiment_id]))


def check_nothing_lost(uri: str) -> None:
    with multiprocessing.get_context("spawn").Pool(WRITERS) as pool:
        pool.starmap(write, [(uri, writer) for writer in range(WRITERS)])
    found = runs(uri)
    written = {f"{writer}.{number}" for writer in range(WRITERS) for number in range(RUNS)}
    assert sorted(run.data.tags[tracking.RECORD] for run in found) == sorted(written)
    metrics = logged.metrics(Result.read(RECORD))
    assert all(run.info.status == "FINISHED" and run.data.metrics.items() >= metrics.items() for run in found)


def test_eight_processes_lose_nothing_in_one_sqlite_file_that_none_has_made(tmp_path: Path) -> None:
    check_nothing_lost(f"sqlite:///{tmp_path}/mlflow.db")


# --- PostgreSQL ------------------------------------------------------------------------------------------------


@pytest.fixture
def postgres() -> Iterator[str]:
    """A data base server of this test's own; the address of an empty data base."""
    pytest.importorskip("psycopg2")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    binaries = Path(shutil.which("initdb") or (places[-1] / "initdb" if places else "/")).resolve().parent
    if not (binaries / "initdb").is_file():
        pytest.skip("PostgreSQL is not installed")
    data, port = Path(mkdtemp()), ui.free_port()
    as_user: list[str] = []
    if os.geteuid() == 0:  # it refuses root
        shutil.chown(data, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]

    def execute(*command: str) -> None:
        subprocess.run([*as_user, *command], check=True, cwd="/", stdout=subprocess.DEVNULL, timeout=120)

    execute(str(binaries / "initdb"), "-D", str(data), "-U", "me", "-A", "trust")
    control = [str(binaries / "pg_ctl"), "-D", str(data), "-w"]
    execute(*control, "-l", str(data / "log"), "-o", f"-p {port} -k {data} -h 127.0.0.1", "start")
    try:
        execute(str(binaries / "createdb"), "-h", "127.0.0.1", "-p", str(port), "-U", "me", "optexp")
        yield f"postgresql+psycopg2://me:secret@127.0.0.1:{port}/optexp"
    finally:
        execute(*control, "-m", "immediate", "stop")
        shutil.rmtree(data)


@pytest.mark.postgres
def test_eight_processes_lose_nothing_in_postgresql(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where files go
    tracking.start(mlflow_store.Store(postgres, "another"), "first").finish()  # a data base is set up once
    check_nothing_lost(postgres)
    gone = postgres.replace("/optexp", "/nothing")
    with pytest.raises(TrackingError, match=r"^MLflow store postgresql\+psycopg2://me:\*\*\*@") as caught:
        tracking.start(mlflow_store.Store(gone), "example")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


# --- a server that goes away -----------------------------------------------------------------------------------


@contextmanager
def server(store: str, port: int) -> Iterator[Callable[[], None]]:
    """A tracking server; what is given kills it."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--workers", "1"]
    command += ["--port", str(port), "--artifacts-destination", str(Path(store.partition(":///")[2]).parent / "files")]
    process = subprocess.Popen(
        command,
        env=os.environ | ui.QUICK_START,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    try:
        until(lambda: answers(port))
        yield kill
    finally:
        kill()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def until(true: Callable[[], object], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


def optexp(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command in a folder, with what it prints."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


SIZES: Sequence[int] = (64, 65, 66, 67)
SWEEP = ["device=cpu", "measurement=quick", "verify=only", "isolation=none", "strategy=inplace"]


@pytest.mark.timeout(900)  # two servers and six programs start
def test_a_server_that_is_killed_in_mid_sweep_gets_the_records_later(tmp_path: Path) -> None:
    store, port = f"sqlite:///{tmp_path}/mlflow.db", ui.free_port()
    address = f"http://127.0.0.1:{port}"
    sizes = ",".join(map(str, SIZES))
    with server(store, port) as kill:
        sweep = optexp(
            tmp_path, "optexp", "-m", "workload=gelu", f"workload.size={sizes}", *SWEEP, f"tracking.uri={address}"
        )
        until(lambda: list(tmp_path.glob("multirun/*/*/1/.hydra")))  # the first job has ended
        kill()
        printed = sweep.communicate(timeout=250)[0]
    assert sweep.returncode == 0, printed
    assert printed.count("VERIFIED") >= len(SIZES)
    assert "optexp.sync" in printed
    with server(store, port):
        for _ in range(2):  # nothing is sent twice
            sent = optexp(tmp_path, "optexp.sync", "--store", address)
            assert sent.communicate(timeout=200)[0].startswith(f"{len(SIZES)} records: ")
            assert sent.returncode == 0
    found = runs(store)
    assert len(found) == 1 + len(SIZES)
    assert {run.info.status for run in found} == {"FINISHED"}
    (parent,) = (run for run in found if tracking.PARENT not in run.data.tags)
    assert "optexp.verdict" in parent.data.tags
    jobs = [run for run in found if run is not parent]
    assert {run.data.tags[tracking.PARENT] for run in jobs} == {parent.info.run_id}
    assert sorted(run.data.params["workload.size"] for run in jobs) == sorted(map(str, SIZES))
