"""`python -m optexp.sync [FOLDER ...]`: send records to MLflow that are not there, as when a server was away.

A record is known by its id, so that a second call sends nothing twice. A run that was cut short is completed, and one
that says otherwise than its record is corrected. Folders default to outputs/ and multirun/ of the working folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from optexp.commands.parsing import parser_of
from optexp.errors import TrackingError
from optexp.records import filenames
from optexp.reporting import logged, mlflow_store, summary, tracking
from optexp.result import Result
from optexp.sweeps import sweep

FOLDERS = ("outputs", "multirun")
SWEEP = "multirun.yaml"  # Hydra leaves it in a sweep's folder


def main(arguments: Sequence[str]) -> int:
    """0: the store has every record; 1: it cannot be reached, or there are no records."""
    options = _parser().parse_args(arguments)
    folders = [Path(folder) for folder in options.folders or FOLDERS]
    found = [path for folder in folders for path in records(folder)]
    if not found:
        print(f"optexp.sync: no record below {', '.join(map(str, folders))}", file=sys.stderr)
        return 1
    sender = Sender(mlflow_store.Store(options.store, options.experiment))
    status = 0
    try:
        for path in found:
            sender.send(path.parent.absolute())
    except TrackingError as error:
        print(f"optexp.sync: {error}; run the same command again", file=sys.stderr)
        status = 1
    outcomes = [f"{count} {outcome}" for outcome, count in sender.counts.items()] or ["none sent"]
    print(f"{len(found)} record{'s' if len(found) > 1 else ''}: {', '.join(outcomes)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("sync", __doc__)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="searched for records; or result.json files")
    parser.add_argument("--store", help="default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder")
    parser.add_argument("--experiment", default="optexp", help="default: %(default)s")
    return parser


def records(folder: Path) -> Iterator[Path]:
    """Records below a folder, a job's before those of its trials."""
    if folder.is_file():
        yield folder
        return
    found = folder.rglob(filenames.RESULT)
    every = [path for path in found if filenames.REPLACED not in path.relative_to(folder).parts]
    yield from sorted(every, key=lambda path: (len(path.parts), path))


@dataclass
class Sender:
    """Sends records to a store, each once.

    counts:  records by their outcome, in words
    parents: run of each sweep and of each job with trials, by folder
    """

    store: mlflow_store.Store
    counts: Counter[str] = field(default_factory=Counter)
    parents: dict[Path, str | None] = field(default_factory=dict)

    def send(self, folder: Path) -> str | None:
        """Make the store hold the record in a folder; returns the run's id, None where there is nothing to send.

        Raises:
            TrackingError: the store refuses it, or is away.
        """
        try:
            record = json.loads((folder / filenames.RESULT).read_text())
            result = Result.of(record)
        except (OSError, ValueError, KeyError, TypeError):
            return self._count("cannot be read", None)
        if not result.fingerprint:
            return self._count("of jobs that were never built", None)
        ended_ms = _written_ms(folder / filenames.RESULT)
        key = result.id or str(record.get("digest", ""))
        held = tracking.held(self.store, key) or self._held_before(result)
        if held is None:
            parent, begun_ms = self._parent(folder), ended_ms - int(1000 * result.seconds.get("total", 0))
            tags = {tracking.RECORD: key, **_source(result)}
            run = tracking.start(self.store, logged.name(result), parent, tags, begun_ms)
        elif held.finished and all(held.tags.get(name) == text for name, text in logged.tags(result).items()):
            return self._count("there already", held.run.run_id)
        elif held.finished:
            held.run.overwrite(held.metrics, result, folder)
            return self._count("corrected", held.run.run_id)
        else:
            run = held.run
        run.log(result, folder)
        run.finish(tracking.status_of(result), ended_ms)
        return self._count("sent", run.run_id)

    def _count(self, outcome: str, run_id: str | None) -> str | None:
        self.counts[outcome] += 1
        return run_id

    def _held_before(self, result: Result) -> tracking.Held | None:
        """The run of a record without an id, which names its run."""
        run_id = None if result.id else result.environment.get("mlflow_run")
        return tracking.held_by_run_id(self.store, str(run_id)) if run_id else None

    def _parent(self, folder: Path) -> str | None:
        """The run of the job whose trial this is, or of the sweep whose job."""
        for above in folder.parents:
            is_job = (above / filenames.TRIALS) in folder.parents and (above / filenames.RESULT).is_file()
            if is_job or (above / SWEEP).is_file():
                if above not in self.parents:
                    self.parents[above] = self._job(above) if is_job else self._sweep(above)
                return self.parents[above]
        return None

    def _job(self, folder: Path) -> str | None:
        result = Result.read(folder / filenames.RESULT)
        held = tracking.held(self.store, result.id) if result.id else self._held_before(result)
        return held.run.run_id if held else None

    def _sweep(self, folder: Path) -> str:
        """The run of a sweep, with its ranking."""
        key, note = sweep.identity(folder), folder / filenames.SWEEP_PAGE
        held = tracking.held(self.store, key) or self._opened_before(folder)
        if held and held.finished:
            return held.run.run_id
        config = OmegaConf.load(folder / SWEEP)
        assert isinstance(config, DictConfig)
        tags = {tracking.RECORD: key, sweep.SWEPT: " ".join(config.hydra.overrides.task)}
        begun_ms, name = _written_ms(folder / SWEEP), sweep.name(config)[: sweep.NAME_LIMIT]
        run = held.run if held else tracking.start(self.store, name, tags=tags, begun_ms=begun_ms)
        if note.is_file():
            tags["mlflow.note.content"] = note.read_text()[: logged.TAG_LIMIT]
        ranking = folder / filenames.RANKING
        if ranking.is_file():
            tags["optexp.verdict"] = summary.counted(row["verdict"] for row in json.loads(ranking.read_text()))
        run.log_batch(tags=tags)
        run.log_files(folder)
        run.finish(ended_ms=_written_ms(ranking) if ranking.is_file() else None)
        return run.run_id

    def _opened_before(self, folder: Path) -> tracking.Held | None:
        """The run of a sweep that began before sweeps had ids."""
        opened = folder / tracking.OPEN
        return tracking.held_by_run_id(self.store, opened.read_text().strip()) if opened.is_file() else None


def _written_ms(path: Path) -> int:
    """Unix time at which a file was written."""
    return int(1000 * path.stat().st_mtime)


def _source(result: Result) -> dict[str, str]:
    """The commit of optexp that measured, as MLflow's tag: the one that sends the record may be another."""
    commit = (result.environment.get("optexp_git") or {}).get("commit")
    return {"mlflow.source.git.commit": str(commit)} if commit else {}
