"""`python -m optexp.ui`: MLflow's page on the runs of a store, in the view that compares strategies by workload."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

from optexp.commands.parsing import parser_of
from optexp.errors import TrackingError
from optexp.reporting import mlflow_store, tracking

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 5000, 100  # the first free one is taken
PATIENCE_S = 90.0  # until the server answers
STARTS = "MLflow is starting on port {port}, which takes 10 s or more; its address follows"
QUICK_START = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes that evaluate language models


def main(arguments: Sequence[str]) -> int:
    """0: the server was ended; 1: there is no such store, or no server could be started."""
    options = _parser().parse_args(arguments)
    store = mlflow_store.Store(options.store, options.experiment)
    uri = mlflow_store.store_uri(options.store)
    if (missing := _missing(uri)) is not None:
        print(f"optexp.ui: {missing} does not exist: run a comparison here, or name a store: --store", file=sys.stderr)
        return 1
    try:
        if uri.startswith("http"):
            _show(tracking.view(store, uri), options.browser)
            return 0
        port = free_port(options.port)
        print(f"optexp.ui: {STARTS.format(port=port)}", file=sys.stderr, flush=True)
        address = tracking.view(store, f"http://{HOST}:{port}")
    except TrackingError as error:
        print(f"optexp.ui: {error}", file=sys.stderr)
        return 1
    return _serve(uri, port, address, options.browser)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("ui", __doc__)
    parser.add_argument("--store", help="default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder")
    parser.add_argument("--experiment", default="optexp", help="default: %(default)s")
    parser.add_argument("--port", type=int, help=f"default: the first free one from {FIRST_PORT} on")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address alone")
    return parser


def _missing(uri: str) -> Path | None:
    """The file of an SQLite store that does not exist: MLflow would make an empty one."""
    file = mlflow_store.sqlite_file(uri)
    return file if file and not file.is_file() else None


def free_port(named: int | None = None) -> int:
    """The named port, else the first free one from 5000 on.

    Raises:
        TrackingError: it is taken, or all are.
    """
    if named is not None:
        if not _is_free(named):
            raise TrackingError(f"port {named} is taken: name another by --port, or none")
        return named
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        if _is_free(port):
            return port
    raise TrackingError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is free: name one by --port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _serve(uri: str, port: int, address: str, browser: bool) -> int:
    """Run `mlflow ui` until it ends or Ctrl-C ends it."""
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", HOST, "--port", str(port)]
    command += ["--workers", "1"]
    if place := mlflow_store.artifacts(uri):
        command += ["--default-artifact-root", place]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C
    with tempfile.TemporaryFile() as log:
        variables = os.environ | mlflow_store.DEFAULTS | QUICK_START
        server = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)
        try:
            if not _answers(server, port):
                log.seek(0)
                last = (log.read().decode(errors="replace").strip().splitlines() or ["it does not answer"])[-1]
                print(f"optexp.ui: mlflow ui could not be started: {last}", file=sys.stderr)
                return 1
            _show(address, browser)
            print(f"Ctrl-C ends the server{_tunnel(port)}", flush=True)
            return 1 if server.wait() else 0
        except KeyboardInterrupt:
            return 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # its workers, too
            server.wait()


def _tunnel(port: int) -> str:
    """The command that brings the page to the reader's own machine, where this one was reached by ssh."""
    machine = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return f"; on your own machine: ssh -N -L {port}:{HOST}:{port} {machine[0]}" if machine else ""


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2):
                return True
        except (URLError, OSError):
            time.sleep(0.2)
    return False


def _show(address: str, browser: bool) -> None:
    print(address, flush=True)
    if browser:
        webbrowser.open(address)
