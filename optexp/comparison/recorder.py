"""Write a result down and show it: result.json, the report, MLflow, the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from optexp.comparison.session import Session
from optexp.config import search_path
from optexp.errors import ConfigError, TrackingError
from optexp.records import filenames
from optexp.records.folder import drawing, full, tolerating
from optexp.reporting import card, compiler_page, logged, report, terminal, tracking, waterfall
from optexp.reporting.tracking import Run
from optexp.result import Problem, Result, Verdict
from optexp.workers.serving import describe

DRAWN: Mapping[str, Callable[[Result, Path], object]] = {  # pages and pictures of a record
    "the waterfall": waterfall.draw,
    "the decision card": card.write,
    "the report": lambda result, output: report.write(result, output / filenames.REPORT),
    "the compiler's page": compiler_page.write,
}
PARENT_RUN = "OPTEXP_PARENT_RUN"  # environment variable, set by a sweep: id of its MLflow run


class Recorder:
    """Holds the MLflow run open while a comparison works, so that an interrupted one is marked KILLED.

    Args:
        parent: Id of the MLflow run that this one is nested in; None: the sweep's, in a sweep.
    """

    def __init__(self, session: Session, show: terminal.Show = terminal.show, parent: str | None = None) -> None:
        self.parent = parent
        self.session, self.output, self.watch, self.show = session, session.output, session.watch, show
        self.run: Run | None = None
        self.trouble: str | None = None
        self.decided = False  # the verdict is written down

    def start(self) -> None:
        """Open the MLflow run; a store that cannot be reached costs the record there, not the result."""
        tracked, result = self.session.experiment.tracking, self.session.result
        if not tracked.enabled:
            return
        try:
            parent = self.parent or os.environ.get(PARENT_RUN)
            self.run = tracking.start(tracked, logged.name(result), parent, {tracking.RECORD: result.id})
            result.environment["mlflow_run"] = self.run.run_id  # by which a sweep finds it, to correct it
            with tolerating(result.notes):
                (self.output / tracking.OPEN).write_text(self.run.run_id)  # to close it if this process is killed
        except TrackingError as error:
            self.trouble = str(error)
            if self.show is not silent and not search_path.in_sweep():
                later = f"python -m optexp.sync {self.output} sends it later"
                self.session.progress.say(f"optexp: {error}; the run goes on, its record stays, and {later}")

    def finish(self, result: Result) -> None:
        """Write the record, show it, and log it last: the verdict does not wait for the store."""
        if self.run is None and self.trouble is None:  # it ended before its arms started
            self.start()
        if self.trouble and not self._told_by_sweep:
            result.notes.append(self._not_logged(self.trouble))
        self.decided = True
        self.session.progress.expect(0.0)
        with self.session.working("record", "writing the report"), tolerating(result.notes):
            self._write(result)
            for what, draw in DRAWN.items():
                with drawing(what, result.notes):
                    draw(result, self.output)
        self.session.progress.stop()
        self.show(result, self.output, None if search_path.in_sweep() else self.run)  # a sweep names the store once
        with self.watch.phase("tracking"), tolerating(result.notes):
            self._log(result)
            self._write(result)

    def _log(self, result: Result) -> None:
        if self.run is None:
            return
        try:
            self.run.log(result, self.output)
            self.run.finish(tracking.status_of(result))
        except TrackingError as error:
            result.notes.append(self._not_logged(error))
            print(f"optexp: {self._not_logged(error)}", file=sys.stderr)
            with suppress(TrackingError):
                self.run.finish("FAILED")
        (self.output / tracking.OPEN).unlink(missing_ok=True)

    def _not_logged(self, reason: object) -> str:
        later = "" if full(self.output) else f"; python -m optexp.sync {self.output} sends the record later"
        return f"not in MLflow: {reason}{later}"

    @property
    def _told_by_sweep(self) -> bool:
        """Whether the sweep has already reported, for all its jobs, that it cannot reach the store."""
        return search_path.in_sweep() and PARENT_RUN not in os.environ

    def _write(self, result: Result) -> None:
        result.seconds = self.watch.rounded()
        result.write(self.output / filenames.RESULT)
        (self.output / filenames.ENVIRONMENT).write_text(json.dumps(result.environment, indent=2) + "\n")
        (self.output / filenames.CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(result.config)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and not self.decided:
            interrupted(self.session.result, error, self.session.progress.name)
            with tolerating(self.session.result.notes):
                self._write(self.session.result)
                if self.show is not silent:
                    self.session.progress.stop()
                    terminal.show_interrupted(self.session.result, self.output)
        if kind is not None and self.run is not None:
            with suppress(TrackingError):
                self.run.finish("KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")
            (self.output / tracking.OPEN).unlink(missing_ok=True)


def silent(result: Result, folder: Path, run: object = None) -> None:
    """Nothing is printed of a comparison that is one of several: their job shows them all."""


def interrupted(result: Result, error: KeyboardInterrupt, phase: str) -> None:
    """Make the record of a comparison say that it was ended from outside, and when."""
    how = f" ({error})" if str(error) else ""
    during = f" during {phase}" if phase else ""
    result.verdict, result.error = Verdict.ERROR, Problem("Interrupted", f"interrupted{how}{during}")
    result.headline = f"ERROR: {result.error.message}"
    result.withhold()


def not_built(
    error: Exception | KeyboardInterrupt, config: DictConfig, output: Path, show: terminal.Show = terminal.show
) -> Result:
    """A job that could not be built: one sentence for a mistake, and a record so that a sweep can rank it."""
    raised = describe(error)
    if isinstance(error, ConfigError):
        raised = replace(raised, message=str(error), traceback="")
    plain: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    result = Result(
        verdict=Verdict.ERROR,
        headline=f"ERROR: {raised.message}",
        workload=str(plain.get("workload", {}).get("_target_", "?")).rpartition(".")[2].lower(),
        strategy=list(plain.get("strategy") or {}),
        device=str(plain.get("device")),
        seed=0,
        config=plain,
        error=Problem(raised.type, raised.message, raised.traceback),
    )
    if isinstance(error, KeyboardInterrupt):
        interrupted(result, error, "its start")
    with tolerating(result.notes):
        result.write(output / filenames.RESULT)
    if isinstance(error, KeyboardInterrupt):
        terminal.show_interrupted(result, output)
    else:
        show(result, output, None)
    return result
