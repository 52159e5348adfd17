"""Jobs' records and their MLflow runs, brought up to what only the whole sweep knows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from optexp.errors import TrackingError
from optexp.records import filenames
from optexp.records.patch import allowed
from optexp.reporting import card, report, tracking
from optexp.reporting.titles import titles
from optexp.result import Result


def correct(config: DictConfig, job: Path, first: Result, result: Result) -> None:
    """Replace a job's record, and what its MLflow run holds, by the result of the whole sweep.

    Args:
        first: The job's own result. Its files move into `by_itself` where the job was measured again.
    """
    if result.by_itself and result.by_itself.again:
        (job / filenames.REPLACED).mkdir(exist_ok=True)
        for name in (filenames.RESULT, filenames.REPORT, filenames.SAMPLES):
            if (job / name).is_file():
                (job / name).replace(job / filenames.REPLACED / name)
        with suppress(FileNotFoundError):  # nothing was timed
            shutil.copy(job / result.by_itself.again / filenames.SAMPLES, job)
    if not allowed(result.verdict, str(result.config.get("patch"))):
        (job / filenames.PATCH).unlink(missing_ok=True)
        result.notes = [note for note in result.notes if not note.startswith(filenames.PATCH)]
    result.write(job / filenames.RESULT)
    card.write(result, job)
    report.write(result, job / filenames.REPORT)
    if config.tracking.enabled:
        for run_id in _runs(first, result):
            try:
                tracking.reopen(config.tracking, run_id).correct(first, result, job)
            except TrackingError as error:
                print(f"optexp: what the sweep corrected is not in MLflow: {error}", file=sys.stderr)


def _runs(first: Result, result: Result) -> list[str]:
    """A job's runs in MLflow: its own, and that of its result where it was measured again."""
    runs = dict.fromkeys(r.environment.get("mlflow_run") for r in (first, result))
    return [run_id for run_id in runs if run_id]


def name_apart(config: DictConfig, firsts: Sequence[Result], results: Sequence[Result]) -> None:
    """Add the settings in which the jobs differ to the names of their MLflow runs.

    Args:
        firsts: The jobs' own results, which name the runs.
        results: The same jobs' results in the end.
    """
    if not config.tracking.enabled:
        return
    try:
        for first, result, title in zip(firsts, results, titles(results), strict=True):
            for run_id in _runs(first, result) if title != result.workload else ():
                tracking.reopen(config.tracking, run_id).rename(f"{title} · {result.label}")
    except TrackingError as error:
        print(f"optexp: the settings of the jobs are not in the names of their runs: {error}", file=sys.stderr)
