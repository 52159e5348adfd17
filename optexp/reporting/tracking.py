"""MLflow: one run per comparison, nested under its sweep. The only module that imports mlflow, and not before it must.

`optexp.reporting.logged` says what a run holds.
"""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optexp.errors import TrackingError
from optexp.records import filenames
from optexp.reporting import logged, mlflow_view
from optexp.reporting.mlflow_store import (
    FILE,
    Node,
    Store,
    artifacts,
    failures_named,
    locked,
    require_answer,
    sqlite_file,
    store_uri,
    without_password,
)
from optexp.result import Result, Verdict

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.entities import Run as StoredRun
    from mlflow.tracking import MlflowClient

BATCH_LIMIT = 100  # params in one request
POINT_LIMIT = 800  # metrics in one request, beside params and tags
OPEN = ".mlflow_run"  # file in a comparison's folder: the id of its run while the run is open
RECORD = "optexp.record"  # tag: id of the comparison or the sweep
PARENT = "mlflow.parentRunId"
STORE_RETRIES = 3  # of a data base that does not answer; MLflow's own 10 keep a finished result waiting for minutes

# --- runs ------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An open MLflow run: `log` what came out, then `finish` it.

    begun_ms:   Unix time of its begin; metrics carry it, so that logging them twice adds nothing
    experiment: name of its experiment
    """

    client: MlflowClient
    uri: str
    experiment_id: str
    run_id: str
    begun_ms: int
    experiment: str

    def log(self, result: Result, folder: Path) -> None:
        """Everything of one comparison: params, metrics and tags in one batch, then the files in `folder`."""
        self.log_batch(logged.metrics(result), logged.params(result), logged.tags(result), logged.system(result))
        self.log_files(folder)

    def correct(self, first: Result, result: Result, folder: Path) -> None:
        """Log the final result of `first`; a figure that is no longer shown becomes NaN, as none can be deleted."""
        self.overwrite(logged.metrics(first), result, folder)

    def overwrite(self, shown: Mapping[str, float], result: Result, folder: Path) -> None:
        """Replace what the run holds by a record.

        Args:
            shown: Metrics of the run.
        """
        now = replace(self, begun_ms=int(time.time() * 1000))  # later values hide earlier ones
        now.log_batch(dict.fromkeys(shown, math.nan) | logged.metrics(result), tags=logged.tags(result))
        self.log_files(folder)

    def rename(self, name: str) -> None:
        """Set the run's name in lists and comparisons."""
        with self._writing():
            self.client.update_run(self.run_id, name=name)

    def log_batch(
        self,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        points: Sequence[logged.Point] = (),
    ) -> None:
        """One request for all of it, as far as MLflow allows: one by one takes ten times as long."""
        with self._writing():
            from mlflow.entities import Metric, Param, RunTag

            entries = [Param(name, value) for name, value in (params or {}).items()]
            values = [Metric(name, value, self.begun_ms, 0) for name, value in (metrics or {}).items()]
            values += [Metric(p.name, p.value, self.begun_ms + int(p.at_s * 1000), p.step) for p in points]
            self.client.log_batch(
                self.run_id,
                metrics=values[:POINT_LIMIT],
                params=entries[:BATCH_LIMIT],
                tags=[RunTag(name, value) for name, value in (tags or {}).items()],
            )
            for begin in range(BATCH_LIMIT, len(entries), BATCH_LIMIT):
                self.client.log_batch(self.run_id, params=entries[begin : begin + BATCH_LIMIT])
            for begin in range(POINT_LIMIT, len(values), POINT_LIMIT):
                self.client.log_batch(self.run_id, metrics=values[begin : begin + POINT_LIMIT])

    def log_files(self, folder: Path) -> None:
        """The files of `filenames.LOGGED` that exist in `folder`, under the same relative paths."""
        with failures_named(self.uri):
            for path in (path for pattern in filenames.LOGGED for path in sorted(folder.glob(pattern))):
                if path.is_file():
                    parent = path.parent.relative_to(folder)
                    self.client.log_artifact(self.run_id, str(path), str(parent) if parent.parts else None)

    def finish(self, status: str = "FINISHED", ended_ms: int | None = None) -> None:
        """End it as FINISHED, FAILED or KILLED, now or at a Unix time."""
        with self._writing():
            self.client.set_terminated(self.run_id, status, ended_ms)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with failures_named(self.uri), locked(self.uri):
            yield

    @property
    def where(self) -> str:
        """How to look at it: its address on a server, else the command that shows a local store."""
        if self.uri.startswith("http"):
            return mlflow_view.run_address(without_password(self.uri), self.experiment_id, self.run_id)
        command, here = "python -m optexp.ui", f"sqlite:///{Path.cwd()}/"
        if self.experiment != Store.experiment:
            command += f" --experiment {shlex.quote(self.experiment)}"
        if self.uri == f"{here}{FILE}":
            return command
        uri = "sqlite:///" + self.uri.removeprefix(here) if self.uri.startswith(here) else self.uri
        return f"{command} --store {without_password(uri)}"


def start(
    config: Node,
    name: str,
    parent_run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    begun_ms: int | None = None,
) -> Run:
    """Open a run called `name`, nested under its parent where it has one.

    Args:
        begun_ms: Unix time at which its comparison began; None: now.
    """
    uri = store_uri(config.uri)
    with failures_named(uri):
        require_answer(uri)
        from mlflow.tracking.context.registry import resolve_tags

        labels = {**resolve_tags(), "mlflow.source.name": "optexp", **(tags or {})}
        if parent_run_id:
            labels[PARENT] = parent_run_id
        with locked(uri):
            client = _client(uri)
            experiment = _experiment(client, config.experiment, uri)
            run = client.create_run(experiment, begun_ms, labels, name)
        return Run(client, uri, experiment, run.info.run_id, run.info.start_time, config.experiment)


def reopen(config: Node, run_id: str) -> Run:
    """A run that has ended."""
    uri = store_uri(config.uri)
    with failures_named(uri):
        with locked(uri):
            client = _client(uri)
        return _opened(client, uri, client.get_run(run_id), config)


def _opened(client: MlflowClient, uri: str, run: StoredRun, config: Node) -> Run:
    return Run(client, uri, run.info.experiment_id, run.info.run_id, run.info.start_time, config.experiment)


@contextmanager
def reading(config: Node) -> Iterator[MlflowClient]:
    """A client of a store that exists, for reading.

    Raises:
        TrackingError: there is no such store, or it cannot be read.
    """
    uri = store_uri(config.uri)
    if (file := sqlite_file(uri)) and not file.is_file():
        raise TrackingError(f"there is no MLflow store {without_password(uri)}")
    with failures_named(uri):
        with locked(uri):
            client = _client(uri)
        yield client


def resume(config: Node, run_id: str) -> Run:
    """Open a run again, whether it has ended or not."""
    run = reopen(config, run_id)
    with failures_named(run.uri), locked(run.uri):
        run.client.update_run(run_id, status="RUNNING")
    return run


def close_left_open(config: Node, folder: Path) -> None:
    """Mark the run as KILLED that a comparison in `folder` opened and, as its process was killed, did not close.

    A store that cannot be reached keeps the run open, which costs nothing else.
    """
    path = folder / OPEN
    if not path.is_file():
        return
    with suppress(TrackingError):
        reopen(config, path.read_text().strip()).finish("KILLED")
    path.unlink(missing_ok=True)


def status_of(result: Result) -> str:
    """MLflow's status of a run whose record is complete: an ERROR is no success."""
    if result.error is not None and result.error.type == "Interrupted":
        return "KILLED"
    return "FAILED" if result.verdict is Verdict.ERROR else "FINISHED"


def log_later(config: Node, result: Result, folder: Path, parent_run_id: str | None = None) -> None:
    """Log a record whose comparison could not reach the store.

    Raises:
        TrackingError: neither can this process.
    """
    run = start(config, logged.name(result), parent_run_id, {RECORD: result.id})
    result.environment["mlflow_run"] = run.run_id
    result.write(folder / filenames.RESULT)
    run.log(result, folder)
    run.finish(status_of(result))


# --- what a store holds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A run that a store holds.

    finished: its logging was completed
    """

    run: Run
    finished: bool
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


def held(config: Node, record: str) -> Held | None:
    """The run of a record or a sweep by its id; None where the store has none."""
    uri = store_uri(config.uri)
    with failures_named(uri):
        with locked(uri):
            client = _client(uri)
            experiment = _experiment(client, config.experiment, uri)
        found = client.search_runs([experiment], f"tags.`{RECORD}` = '{record}'", max_results=1)
        return _held(client, uri, found[0], config) if found else None


def held_by_run_id(config: Node, run_id: str) -> Held | None:
    """A run by MLflow's own id; None where the store has none."""
    uri = store_uri(config.uri)
    with failures_named(uri):
        from mlflow.exceptions import MlflowException

        with locked(uri):
            client = _client(uri)
        try:
            return _held(client, uri, client.get_run(run_id), config)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None


def _held(client: MlflowClient, uri: str, run: StoredRun, config: Node) -> Held:
    errs = run.data.tags.get("optexp.verdict") == Verdict.ERROR  # whose logged record ends FAILED or KILLED
    finished = run.info.status in (("FINISHED", "FAILED", "KILLED") if errs else ("FINISHED",))
    return Held(_opened(client, uri, run, config), finished, run.data.metrics, run.data.tags)


def view(config: Node, server: str) -> str:
    """The address of an experiment's runs on a server, in the view by workload, which this makes if need be."""
    uri = store_uri(config.uri)
    with failures_named(uri), locked(uri):
        return mlflow_view.address(server, _experiment(_client(uri), config.experiment, uri))


def _client(uri: str) -> MlflowClient:
    from mlflow.store.db import utils
    from mlflow.tracking import MlflowClient

    utils.MAX_RETRY_COUNT = STORE_RETRIES
    _quieten()
    return MlflowClient(tracking_uri=uri)


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            client.create_experiment(name, artifacts(uri), mlflow_view.EXPERIMENT_TAGS)
        except Exception:
            if client.get_experiment_by_name(name) is None:  # else another process was faster
                raise
        found = client.get_experiment_by_name(name)
        assert found is not None
    if found.lifecycle_stage != "active":
        raise TrackingError(f"the MLflow experiment {name!r} was deleted: restore it or set tracking.experiment=")
    _describe(client, found)
    return str(found.experiment_id)


def _describe(client: MlflowClient, experiment: Experiment) -> None:
    """Give an experiment that another program or version made what it lacks; a person's description is kept."""
    wanted = dict(mlflow_view.EXPERIMENT_TAGS)
    if mlflow_view.DESCRIPTION not in experiment.tags:
        wanted[mlflow_view.DESCRIPTION] = mlflow_view.description(experiment.experiment_id)
    for tag, value in wanted.items():
        if experiment.tags.get(tag) != value:
            client.set_experiment_tag(experiment.experiment_id, tag, value)


def _quieten() -> None:
    """Migrations narrate every step at INFO, which alembic's own set-up would turn on again; we name failures."""
    for name in ("alembic", "mlflow.store", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints an error with its traceback
