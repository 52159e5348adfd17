"""An MLflow store: its address, one writer at a time where it is a file, and its failures in one sentence."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from optexp.errors import TrackingError

FILE = "mlflow.db"  # the default store, in the working folder
AWAY = "the server does not answer"
PORTS = {"http": 80, "https": 443}
CONNECT_S = 2.0
UNREACHED = re.compile("Max retries exceeded.*(NewConnectionError|ConnectTimeout|Name ?Resolution)")
DRIVER = re.compile(r"^\([\w.]+\) ")  # "(sqlite3.OperationalError) database or disk is full"
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its own default keeps a finished result waiting for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


class Node(Protocol):
    """The `tracking` part of a configuration, typed or not."""

    @property
    def uri(self) -> str | None: ...
    @property
    def experiment(self) -> str: ...


@dataclass(frozen=True)
class Store:
    """A store's address and an experiment in it."""

    uri: str | None = None
    experiment: str = "optexp"


def store_uri(configured: str | None) -> str:
    """The configured store, else MLFLOW_TRACKING_URI, else an SQLite file in the working folder."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / FILE}"


def artifacts(uri: str) -> str | None:
    """Where files go: beside an SQLite store; None where the server decides."""
    file = sqlite_file(uri)
    return (file.parent / "mlartifacts").as_uri() if file else None


@contextmanager
def locked(uri: str) -> Iterator[None]:
    """Hold the lock of an SQLite store; nothing for other stores.

    Concurrent first migrations corrupt such a store, and a write fails that waits for longer than SQLite's time-out.
    """
    file = sqlite_file(uri)
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.parent / ".mlflow.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite store; None for other stores."""
    path = uri.partition(":///")[2]
    return Path(path).absolute() if uri.startswith("sqlite:") and path and path != ":memory:" else None


@contextmanager
def failures_named(uri: str) -> Iterator[None]:
    """Set MLflow's defaults, and turn every exception of a store or its driver into one sentence.

    Raises:
        TrackingError: the sentence, without the store's password.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        shown = without_password(uri)
        raise TrackingError(f"MLflow store {shown}: {_reason(error).replace(uri, shown)}") from error


def require_answer(uri: str) -> None:
    """Return where a server listens at an address, or where a proxy knows, or the address is no server's.

    MLflow itself asks for many seconds.

    Raises:
        TrackingError: no server listens.
    """
    parts = urlsplit(uri)
    if parts.scheme not in PORTS or not parts.hostname:
        return
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return
    try:
        socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), CONNECT_S).close()
    except OSError:
        raise TrackingError(f"MLflow store {without_password(uri)}: {AWAY}") from None


def _reason(error: Exception) -> str:
    """The first line of an error, without the driver's name; a few words where the server does not answer."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if UNREACHED.search(first):
        return AWAY
    return DRIVER.sub("", first)


def without_password(uri: str) -> str:
    """A store's address as people may read it."""
    parts = urlsplit(uri)
    if not parts.password:
        return uri
    return parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}").geturl()
