"""Recorded comparisons, read from the `result.json` of MLflow's runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from optexp.errors import TrackingError
from optexp.records import filenames
from optexp.reporting import tracking
from optexp.reporting.mlflow_store import Node, without_password
from optexp.result import Result

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RUN_ID = re.compile(r"[0-9a-f]{32}")
PAGE = 100  # runs in one request


@dataclass(frozen=True)
class Recorded:
    """A comparison that MLflow holds, and the tags of its run."""

    run_id: str
    started: datetime
    result: Result
    tags: Mapping[str, str] = field(default_factory=dict)


def records(config: Node, against: str, workload: str | None = None, limit: int | None = None) -> Iterator[Recorded]:
    """Finished comparisons, the newest first; runs without a readable record are left out.

    Args:
        against: Id of a run (of a comparison or of a sweep), name of an experiment, or a tag as name or name:value.
        workload: Name that they have; None: any.
        limit: At most so many.

    Raises:
        TrackingError: the store cannot be read, or holds nothing of this name.
    """
    with tracking.reading(config) as client:
        found = _found(client, against, workload)
    yield from islice(_read(config, found), limit)


def _read(config: Node, runs: Iterator[Any]) -> Iterator[Recorded]:
    with tracking.reading(config) as client, TemporaryDirectory(prefix="optexp-") as folder:
        for run in runs:
            try:
                path = client.download_artifacts(run.info.run_id, filenames.RESULT, folder)
                result = Result.read(Path(path))
            except Exception:
                continue  # a sweep's own run has no record, and other programs log runs, too
            started = datetime.fromtimestamp(run.info.start_time / 1000)
            yield Recorded(run.info.run_id, started, result, run.data.tags)


def _found(client: MlflowClient, against: str, workload: str | None) -> Iterator[Any]:
    only = [f"tags.`optexp.workload` = '{_quoted(workload)}'"] if workload else []
    finished = ["attributes.status = 'FINISHED'", *only]
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    if RUN_ID.fullmatch(against):
        run = client.get_run(against)
        nested = [*finished, f"tags.mlflow.parentRunId = '{against}'"]
        return chain([run], _search(client, [run.info.experiment_id], nested))
    tag, colon, value = against.partition(":")
    experiment = client.get_experiment_by_name(against)
    if experiment is not None:
        return _search(client, [experiment.experiment_id], finished)
    wanted = f"tags.`{tag}` = '{_quoted(value)}'" if colon else f"tags.`{tag}` LIKE '%'"
    if not client.search_runs(everywhere, wanted, max_results=1):
        raise TrackingError(f"{against} is no run, experiment or tag in {without_password(client.tracking_uri)}")
    return _search(client, everywhere, [*finished, wanted])


def _search(client: MlflowClient, experiments: Sequence[str], conditions: Sequence[str]) -> Iterator[Any]:
    token: str | None = None
    while True:
        page = client.search_runs(
            list(experiments), " and ".join(conditions), max_results=PAGE,
            order_by=["attributes.start_time DESC"], page_token=token,
        )  # fmt: skip
        yield from page
        token = page.token
        if not token:
            return


def _quoted(text: str) -> str:
    return text.replace("'", "''")
