"""MLflow: one run per comparison, nested under its sweep. The only module that imports mlflow, and not before it must.

Names of params, metrics, tags and artifacts are fixed: people and dashboards depend on them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from optexp.errors import TrackingError
from optexp.reporting import summary
from optexp.result import Result, Verdict

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

VALUE_LIMIT = 6000  # characters of a param that MLflow keeps
TAG_LIMIT = 8000
NAME_LIMIT = 250
BATCH_LIMIT = 100  # params in one request
ARTIFACTS = (
    "result.json", "report.html", "config.yaml", "environment.json", "samples.parquet", "repro.py", "repro.pkl",
    "optimized.patch", "strategy.yaml", "sweep.json", "study.md", "traces/*.json.gz", "flamegraphs/*", "nsight/*-rep",
    "plots/*.png", "code/**/*", "compiler.html", "compiler/**/*", "memory/*.pickle",
)  # fmt: skip
COLUMNS = (  # of the list of runs, in this order
    "tags.`optexp.verdict`", "metrics.`speedup/low`", "metrics.`speedup/estimate`", "metrics.`time/baseline_us`",
    "metrics.`time/candidate_us`", "metrics.`memory/candidate_peak_mib`", "tags.`optexp.device`",
)  # fmt: skip
VIEW = "optexp"  # MLflow's name for the list with these columns
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW}": json.dumps(
        {"selectedColumns": COLUMNS, "columnOrder": COLUMNS, "columnWidths": dict.fromkeys(COLUMNS, 130)}
    ),
}
OPEN = ".mlflow_run"  # file in a comparison's folder: the id of its run while the run is open
KIND = "workflowType=machine_learning"  # in an address; without it the page is about language models
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


# --- runs ------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An open MLflow run: `log` what came out, then `finish` it."""

    client: MlflowClient
    uri: str
    experiment_id: str
    run_id: str

    def log(self, result: Result, folder: Path) -> None:
        """Everything of one comparison: params, metrics and tags in one batch, then the files in `folder`."""
        self.log_batch(metrics(result), params(result), tags(result))
        self.log_files(folder)

    def correct(self, first: Result, result: Result, folder: Path) -> None:
        """What came of `first` in the end; a figure that is no longer shown becomes NaN: none can be deleted."""
        found = metrics(result)
        self.log_batch(dict.fromkeys(metrics(first), math.nan) | found, tags=tags(result))
        self.log_files(folder)

    def rename(self, name: str) -> None:
        """What lists and comparisons call it."""
        with _failures_named(self.uri):
            self.client.update_run(self.run_id, name=name)

    def log_batch(
        self,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """One request for all of it: one by one takes ten times as long."""
        with _failures_named(self.uri):
            from mlflow.entities import Metric, Param, RunTag

            now = int(time.time() * 1000)
            entries = [Param(name, value) for name, value in (params or {}).items()]
            self.client.log_batch(
                self.run_id,
                metrics=[Metric(name, value, now, 0) for name, value in (metrics or {}).items()],
                params=entries[:BATCH_LIMIT],
                tags=[RunTag(name, value) for name, value in (tags or {}).items()],
            )
            for begin in range(BATCH_LIMIT, len(entries), BATCH_LIMIT):
                self.client.log_batch(self.run_id, params=entries[begin : begin + BATCH_LIMIT])

    def log_files(self, folder: Path) -> None:
        """The files of `ARTIFACTS` that exist in `folder`, under the same relative paths."""
        with _failures_named(self.uri):
            for path in (path for pattern in ARTIFACTS for path in sorted(folder.glob(pattern))):
                if path.is_file():
                    parent = path.parent.relative_to(folder)
                    self.client.log_artifact(self.run_id, str(path), str(parent) if parent.parts else None)

    def finish(self, status: str = "FINISHED") -> None:
        """End it as FINISHED, FAILED or KILLED."""
        with _failures_named(self.uri):
            self.client.set_terminated(self.run_id, status)

    @property
    def where(self) -> str:
        """How to look at it: an address on a server, else the command that shows a local store, then its page."""
        if self.uri.startswith("http"):
            return f"{_without_password(self.uri)}/#/experiments/{self.experiment_id}/runs/{self.run_id}?{KIND}"
        page = f"http://127.0.0.1:5000/#/experiments/{self.experiment_id}/runs?{KIND}&viewStateShareKey={VIEW}"
        here = f"sqlite:///{Path.cwd()}/"
        uri = "sqlite:///" + self.uri.removeprefix(here) if self.uri.startswith(here) else self.uri
        return f"mlflow ui --backend-store-uri {_without_password(uri)}\n{page}"


def start(config: Node, name: str, parent_run_id: str | None = None, tags: Mapping[str, str] | None = None) -> Run:
    """Open a run called `name`, nested under its parent where it has one."""
    uri = store_uri(config.uri)
    with _failures_named(uri):
        from mlflow.tracking import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags

        _quieten()
        labels = {**resolve_tags(), "mlflow.source.name": "optexp", **(tags or {})}
        if parent_run_id:
            labels["mlflow.parentRunId"] = parent_run_id
        with _alone(uri):
            client = MlflowClient(tracking_uri=uri)
            experiment = _experiment(client, config.experiment, uri)
        run = client.create_run(experiment, tags=labels, run_name=name)
        return Run(client, uri, experiment, run.info.run_id)


def reopen(config: Node, run_id: str) -> Run:
    """A run that has ended."""
    uri = store_uri(config.uri)
    with _failures_named(uri):
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        return Run(client, uri, client.get_run(run_id).info.experiment_id, run_id)


@contextmanager
def reading(config: Node) -> Iterator[MlflowClient]:
    """A client of a store that exists, for reading.

    Raises:
        TrackingError: there is no such store, or it cannot be read.
    """
    uri = store_uri(config.uri)
    if (file := _sqlite_file(uri)) and not file.is_file():
        raise TrackingError(f"there is no MLflow store {store_name(uri)}")
    with _failures_named(uri):
        from mlflow.tracking import MlflowClient

        _quieten()
        with _alone(uri):
            client = MlflowClient(tracking_uri=uri)
        yield client


def store_name(uri: str) -> str:
    """A store's address for people, without its password."""
    return _without_password(uri)


def resume(config: Node, run_id: str) -> Run:
    """Open a run again that has ended, or that nobody ended."""
    run = reopen(config, run_id)
    with _failures_named(run.uri):
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


def log_later(config: Node, result: Result, folder: Path, parent_run_id: str | None = None) -> None:
    """Log a record whose comparison could not reach the store.

    Raises:
        TrackingError: neither can this process.
    """
    run = start(config, f"{result.workload} · {result.label}", parent_run_id)
    result.environment["mlflow_run"] = run.run_id
    result.write(folder / "result.json")
    run.log(result, folder)
    run.finish()


def store_uri(configured: str | None) -> str:
    """The configured store, else MLFLOW_TRACKING_URI, else an SQLite file in the working folder."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage != "active":
            raise TrackingError(f"the MLflow experiment {name!r} was deleted: restore it or set tracking.experiment=")
        for tag in EXPERIMENT_TAGS.keys() - found.tags.keys():  # somebody else made it
            client.set_experiment_tag(found.experiment_id, tag, EXPERIMENT_TAGS[tag])
        return str(found.experiment_id)
    file = _sqlite_file(uri)
    # A server decides where its files go; those of an SQLite store go beside it.
    place = (file.parent / "mlartifacts").as_uri() if file else None
    try:
        return str(client.create_experiment(name, place, EXPERIMENT_TAGS))
    except Exception:
        found = client.get_experiment_by_name(name)  # another process was faster
        if found is None:
            raise
        return str(found.experiment_id)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """One process at a time opens an SQLite store: concurrent first migrations corrupt it for good."""
    file = _sqlite_file(uri)
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.parent / ".mlflow.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _sqlite_file(uri: str) -> Path | None:
    path = uri.partition(":///")[2]
    return Path(path).absolute() if uri.startswith("sqlite:") and path and path != ":memory:" else None


@contextmanager
def _failures_named(uri: str) -> Iterator[None]:
    """Whatever a store or its driver raises becomes one sentence."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        shown = _without_password(uri)
        raise TrackingError(f"MLflow store {shown}: {first.replace(uri, shown) if uri else first}") from error


def _quieten() -> None:
    """Migrations narrate every step at INFO; alembic's own set-up would turn that on again."""
    for name in ("alembic", "mlflow.store", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _without_password(uri: str) -> str:
    parts = urlsplit(uri)
    if not parts.password:
        return uri
    return parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}").geturl()


# --- what is logged --------------------------------------------------------------------------------------------


def params(result: Result) -> dict[str, str]:
    """The resolved configuration, flattened."""
    flat = summary.flatten(result.config)
    flat = {key: value for key, value in flat.items() if not key.endswith("_target_")}
    flat |= {"workload": result.workload, "strategy": result.label, "device": result.device, "seed": result.seed}
    return {_as_name(key): _as_typed(value)[:VALUE_LIMIT] for key, value in flat.items()}


def _as_name(key: str) -> str:
    """What MLflow accepts; a key of a user's own mapping may be anything, as in strategy.replace.names.*.weight."""
    return re.sub(r"[^\w.\-:/ ]", "_", key)[:NAME_LIMIT]


def _as_typed(value: object) -> str:
    """A value as it is written on the command line."""
    return str(value).lower().replace("none", "null") if value is None or isinstance(value, bool) else str(value)


def metrics(result: Result) -> dict[str, float]:
    """Every figure that runs are compared by; without steps, so that the UI draws bars. Unknown ones are left out."""
    found: dict[str, float | str | None] = {}
    if result.speedup is not None:
        found |= {f"speedup/{end}": getattr(result.speedup, end) for end in ("estimate", "low", "high")}
        if result.verdict is not Verdict.INCONCLUSIVE:
            found["cost/break_even_steps"] = result.measurement.cost.break_even_steps if result.measurement else None
    found["cost/setup_s"] = result.candidate.setup_s
    for arm, figures in (("baseline", result.baseline), ("candidate", result.candidate)):
        found |= {
            f"time/{arm}_us": figures.step_us,
            f"time/{arm}_device_us": figures.device_us,
            f"time/{arm}_p99_us": figures.p99_us,
            f"energy/{arm}_j": figures.energy_j,
            f"throughput/{arm}": figures.throughput,
            f"memory/{arm}_peak_mib": figures.peak_mib,
        }
        arms = result.profile.arms()
        physics = arms[arm].roofline if arm in arms else None
        found[f"bound/{arm}_us"] = physics.bound.us if physics and physics.bound else None
        profiled = arms[arm].metrics if arm in arms else {}
        found |= {f"profile/{arm}/{name}": value for name, value in profiled.items()}
        by_category = arms[arm].memory if arm in arms else None
        found |= {
            f"memory/{arm}_{name}_mib": size / 2**20 for name, size in (by_category.peak if by_category else {}).items()
        }
    for one in result.profile.predictions:
        found[f"prediction/{one.name.replace('=', ' ')}"] = one.speedup
    if tested := result.profile.prediction:
        bound = tested.prediction
        found |= {"prediction/bound_us": bound.bound_us, "prediction/speedup": bound.speedup}
        found["prediction/measured_over_bound"] = tested.ratio
    if result.equivalence:
        found["equivalence/error_ratio"] = result.equivalence.error_ratio
        found["equivalence/max_ratio"] = result.equivalence.max_ratio
    return {
        name: float(value) for name, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)
    }


def tags(result: Result) -> dict[str, str]:
    """What runs are found by, and a summary to read."""
    found = {
        "optexp.verdict": str(result.verdict),
        "optexp.workload": result.workload,
        "optexp.strategy": result.label,
        "optexp.device": str(result.environment.get("gpu") or result.environment.get("cpu") or result.device),
        "optexp.evidence": "; ".join(summary.evidence(result)),
        "optexp.fingerprint": result.fingerprint,
        **({"optexp.replay": result.draws.key} if result.draws and result.draws.replayed else {}),
        **({"optexp.regression": summary.regression(result)} if result.regression else {}),
        "mlflow.note.content": note(result),
    }
    return {name: value[:TAG_LIMIT] for name, value in found.items()}


def note(result: Result) -> str:
    """A Markdown summary: MLflow shows it on the run's page."""
    parts = [f"**{result.headline}**"]
    if result.verdict.measured:
        parts.append(
            "| | baseline | candidate | |\n|---|--:|--:|--:|\n"
            + "\n".join(f"| {r.name} | {r.baseline} | {r.candidate} | {r.change} |" for r in summary.rows(result))
        )
    lines = [
        *(f"Verified: {text}" for text in [summary.verified(result)] if text),
        *(f"Evidence: {text}" for text in summary.evidence(result)),
        *result.explanation,
        *summary.memory_reasons(result),
        *(f"Cost: {text}" for text in [summary.cost(result)] if text),
        *(f"Try next: {text}" for text in [summary.suggestion(result)] if text),
    ]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)]).strip()
