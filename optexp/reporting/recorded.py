"""Recorded comparisons: read from MLflow's runs by their result.json, and told apart by what was compared."""

from __future__ import annotations

import json
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
from optexp.reporting.titles import flatten
from optexp.reporting.tracking import Node
from optexp.result import Result, finite

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RUN_ID = re.compile(r"[0-9a-f]{32}")
PAGE = 100  # runs in one request
NEAREST_OF = 50  # newest records among which the nearest one is looked for
TORCH = "torch"


@dataclass(frozen=True)
class Recorded:
    """A comparison that MLflow holds, and the tags of its run."""

    run_id: str
    started: datetime
    result: Result
    tags: Mapping[str, str] = field(default_factory=dict)


def identity(result: Result) -> dict[str, str]:
    """The facts under which two results may be compared, by name: the fingerprint of a regression.

    They are workload and its keys, both stacks and their options, dtype, device with its cores, and torch's
    major.minor. Preset, seed and the user's code are left out: code is what a regression is about.
    """
    stacks = ("workload", "strategy", "baseline")
    flat = json.loads(json.dumps(finite(flatten(result.config)), default=str))
    facts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in flat.items()
        if key.partition(".")[0] in stacks or key == "dtype"
    }
    cores = len(result.placement.cpus) if result.placement else 0
    device = f"{result.device_model}, {cores} core{'s' if cores != 1 else ''}" if cores else result.device_model
    version = re.match(r"\d+\.\d+", str(result.environment.get("torch")))
    return {**facts, "workload": result.workload, "device": device, TORCH: version[0] if version else "unknown"}


def differences(recorded: Mapping[str, str], new: Mapping[str, str]) -> dict[str, list[str]]:
    """Facts of two identities that differ, as [recorded, new]; one that is missing is "none"."""
    names = sorted({*recorded, *new})
    pairs = {name: [recorded.get(name, "none"), new.get(name, "none")] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class Match:
    """The newest record of the same identity, or the nearest other one with its differences, or neither."""

    record: Recorded | None = None
    nearest: Recorded | None = None
    differs: Mapping[str, list[str]] | None = None


def match(config: Node, against: str, result: Result) -> Match:
    """The record that a new result is compared with; one that raised an alarm itself is none.

    Args:
        against: Id of a run (of a comparison or of a sweep), name of an experiment, or a tag as name or name:value.

    Raises:
        TrackingError: the store cannot be read, or holds nothing of this name.
    """
    wanted, nearest = identity(result), Match()
    for count, record in enumerate(records(config, against, result.workload)):
        if not _comparable(record, against) or record.run_id == result.environment.get("mlflow_run"):
            continue
        differs = differences(identity(record.result), wanted)
        if not differs:
            return Match(record)
        if count < NEAREST_OF and (nearest.differs is None or len(differs) < len(nearest.differs)):
            nearest = Match(nearest=record, differs=differs)
    return nearest


def _comparable(record: Recorded, against: str) -> bool:
    """Whether it was timed, and raised no alarm, unless it is the one that was named."""
    seen = record.result.regression
    return record.result.speedup is not None and not (seen and seen.alarm and record.run_id != against)


def records(config: Node, against: str, workload: str | None = None, limit: int | None = None) -> Iterator[Recorded]:
    """Finished comparisons, the newest first; runs without a readable record are left out.

    Args:
        against: As in `match`.
        workload: Name that they have; None: any.
        limit: At most so many.

    Raises:
        TrackingError: as `match`.
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
        raise TrackingError(f"{against} is no run, experiment or tag in {tracking.store_name(client.tracking_uri)}")
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
