"""Costs of MLflow's store: seconds to log a run, and seconds until a list and a comparison of runs are answered.

    python tests/benchmarks/store.py [--runs 1000] [--store sqlite:////tmp/x/mlflow.db] [--processes 1]

Each run is a complete record with its report and traces. The store's own server answers what the pages ask for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from optexp.commands.ui import HOST, free_port
from optexp.reporting import logged, mlflow_store, report, tracking
from optexp.result import Result

RECORD = Path(__file__).parents[1] / "results" / "faster.json"
EXPERIMENT = "benchmark of the store"
TRACE_BYTES = 40_000  # of each of six compressed traces
STRATEGIES = ("amp", "fusion", "cuda_graph", "inplace", "amp+fusion")
COMPARED = 10  # runs on a page that compares


def job(folder: Path) -> Path:
    """The files of a comparison, as it leaves them."""
    result = Result.read(RECORD)
    (folder / "traces").mkdir(parents=True)
    result.write(folder / "result.json")
    report.write(result, folder / "report.html")
    for name in ("config.yaml", "environment.json", "repro.py"):
        (folder / name).write_text("x: 1\n" * 200)
    (folder / "samples.parquet").write_bytes(os.urandom(20_000))
    for number in range(6):
        (folder / "traces" / f"{number}.json.gz").write_bytes(gzip.compress(os.urandom(TRACE_BYTES)))
    return folder


def log(uri: str, folder: Path, count: int, first: int = 0) -> list[float]:
    """Log runs one after the other; returns the seconds of each."""
    result, store, seconds = Result.read(RECORD), mlflow_store.Store(uri, EXPERIMENT), []
    for number in range(first, first + count):
        one = replace(result, strategy=[STRATEGIES[number % len(STRATEGIES)]], workload=f"mlp{number % 20}")
        begin = time.perf_counter()
        run = tracking.start(store, logged.name(one), tags={tracking.RECORD: f"record {number}"})
        run.log(one, folder)
        run.finish()
        seconds.append(time.perf_counter() - begin)
    return seconds


def logged_by(uri: str, folder: Path, runs: int, processes: int) -> list[float]:
    """The same by several processes at once."""
    tracking.start(mlflow_store.Store(uri, EXPERIMENT), "first").finish()  # makes the store
    if processes == 1:
        return log(uri, folder, runs)
    share = runs // processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = pool.starmap(log, [(uri, folder, share, part * share) for part in range(processes)])
    return [seconds for part in parts for seconds in part]


def answers(uri: str) -> list[tuple[str, float]]:
    """Seconds that the server takes for the requests of each page."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--port", str(port)]
    quiet = os.environ | mlflow_store.DEFAULTS | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        [*command, "--workers", "1"], env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        _wait(f"http://{HOST}:{port}/health")
        api = f"http://{HOST}:{port}/ajax-api/2.0/mlflow"
        found = _ask(f"{api}/experiments/get-by-name?experiment_name={EXPERIMENT.replace(' ', '%20')}")
        search = {
            "experiment_ids": [found["experiment"]["experiment_id"]],
            "max_results": 100,
            "order_by": ["metrics.`speedup/low` DESC"],
        }
        listed = _ask(f"{api}/runs/search", search)["runs"]
        ids = [run["info"]["run_id"] for run in listed[:COMPARED]]
        return [
            ("list: 100 runs, the best first", _timed(lambda: _ask(f"{api}/runs/search", search))),
            (
                f"comparison of {COMPARED} runs",
                _timed(lambda: [_ask(f"{api}/runs/get?run_id={run_id}") for run_id in ids]),
            ),
        ]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _wait(address: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    sys.exit("the server does not answer")


def _ask(address: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _timed(ask: Callable[[], object], times: int = 5) -> float:
    """The median of several."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        ask()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--store")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        uri = options.store or f"sqlite:///{place}/mlflow.db"
        begin = time.perf_counter()
        used = time.process_time()
        seconds = sorted(logged_by(uri, job(Path(place) / "job"), options.runs, options.processes))
        used = time.process_time() - used
        print(f"{len(seconds)} runs in {time.perf_counter() - begin:.0f} s by {options.processes} processes")
        for name, share in (("median", 0.5), ("99 of 100", 0.99), ("longest", 1.0)):
            print(f"  seconds to log a run, {name}: {seconds[int(share * (len(seconds) - 1))]:.3f}")
        if options.processes == 1:  # what a crowded machine leaves alone
            print(f"  seconds of a core to log a run: {used / len(seconds):.3f}")
        for page, taken in answers(uri):
            print(f"  seconds for the {page}: {taken:.3f}")


if __name__ == "__main__":
    main()
