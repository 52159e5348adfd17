"""MLflow's page opens on the runs of a store, by workload; a store that is not there is not made."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from optexp.commands import ui
from optexp.errors import TrackingError
from optexp.reporting import logged, mlflow_store, tracking
from optexp.result import Result

ROOT = Path(__file__).parents[1]
RECORD = Result.read(ROOT / "tests" / "results" / "faster.json")


def test_a_store_that_does_not_exist_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.main(["--store", f"sqlite:///{tmp_path}/mlflow.db", "--no-browser"]) == 1
    assert capsys.readouterr().err.startswith(f"optexp.ui: {tmp_path}/mlflow.db does not exist: ")
    assert list(tmp_path.iterdir()) == []


def test_it_says_at_once_that_it_starts_and_takes_no_port_of_another_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.db").touch()
    command = ["--store", f"sqlite:///{tmp_path}/mlflow.db", "--no-browser"]

    def view(*_: object) -> str:
        assert capsys.readouterr().err.startswith("optexp.ui: MLflow is starting on port ")
        raise TrackingError("stopped here")

    monkeypatch.setattr(tracking, "view", view)
    assert ui.main(command) == 1
    assert capsys.readouterr().err == "optexp.ui: stopped here\n"
    with socket.socket() as other:
        other.bind((ui.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        assert ui.main([*command, "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"optexp.ui: port {port} is taken: name another by --port, or none\n"


def test_behind_ssh_it_names_the_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.7 51022 10.0.0.2 22")
    assert ui._tunnel(5000) == "; on your own machine: ssh -N -L 5000:127.0.0.1:5000 10.0.0.2"
    monkeypatch.delenv("SSH_CONNECTION")
    assert ui._tunnel(5000) == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
def test_the_page_groups_runs_by_case_with_the_columns_that_are_compared(tmp_path: Path) -> None:
    store = mlflow_store.Store(f"sqlite:///{tmp_path}/mlflow.db")
    for size in (64, 512):
        made = replace(RECORD, config={**RECORD.config, "workload.dim": size}, compared=["workload.dim"])
        run = tracking.start(store, logged.name(made))
        run.log(made, tmp_path)
        run.finish()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    page = subprocess.Popen(
        [sys.executable, "-m", "optexp.ui", "--no-browser"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert page.stdout
        address = page.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=2400,1200"]
        command += ["--virtual-time-budget=60000", "--dump-dom", address]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=200).stdout
    finally:
        page.send_signal(signal.SIGTERM)
        assert page.wait(60) == 0
    for text in ("mlp dim=64", "mlp dim=512", "optexp.verdict", "speedup/low", "time/candidate_us", "5.852"):
        assert text in shown, text
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout.split()
    assert left == []
