"""A sweep is one MLflow run with its jobs nested in it, and ends with a ranking."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from optexp.config.sweep_settings import SweepSettings
from optexp.errors import TrackingError
from optexp.records import filenames
from optexp.result import Result, Verdict, finite
from optexp.sweeps.start import own_folder
from optexp.sweeps.study import STEP, Study

if TYPE_CHECKING:
    from rich.console import Console

    from optexp.reporting.tracking import Run

PARENT = "OPTEXP_PARENT_RUN"  # read by jobs, in this process or in others
SWEPT = "optexp.sweep"  # tag: what was swept
IDENTITY = ".sweep_id"  # file in the sweep's folder
NAME_LIMIT = 120
BEGIN_LATER = ("hydra_plugins.optexp.Steps", "hydra_plugins.optexp.Optuna")  # sweepers that call `begin` themselves
_PARTS = re.compile(r"(\d+)")

_parent: Run | None = None
_started = 0.0
_folder: Path | None = None  # of the sweep that is under way
_expected: list[Path] = []  # folders of this sweep's jobs, as far as its launcher says


def expect(folder: Path) -> None:
    """A job of this sweep has its record in `folder`, or will have it there."""
    if folder not in _expected:
        _expected.append(folder)


def parent_run_id() -> str | None:
    """The id of the sweep's run in MLflow; None where it has none."""
    return _parent.run_id if _parent else None


class SweepCallback(Callback):
    """Hydra calls it in the process that was started, whichever launcher runs the jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Find the earlier sweep that this one goes on with; our own sweepers begin it when they know that it can."""
        global _started
        _started = time.time()
        _expected.clear()
        os.environ.pop(PARENT, None)
        settings = SweepSettings.of(config)
        if settings.resume:
            _continue_earlier(config)
        if not settings.plan and str(OmegaConf.select(config, "hydra.sweeper._target_")) not in BEGIN_LATER:
            begin(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Rank what the jobs wrote down, print it with the answer of a study, and close the parent run."""
        global _folder
        from optexp.reporting import ranking, summary, terminal
        from optexp.sweeps import corrections, overview, page, selection

        _folder = None
        folder, tags = Path(config.hydra.sweep.dir), {}
        try:
            jobs_done = read(folder)
            if jobs_done:
                found = selection.confirm(jobs_done, folder, _again)
                results = summary.ranked(selection.corrected(list(found.values())))
                for job, result in found.items():
                    if result.by_itself or result is not jobs_done[job]:
                        corrections.correct(config, job, jobs_done[job], result)
                record(results, folder)
                ranked = ranking.rows(results)
                corrections.name_apart(config, list(jobs_done.values()), list(found.values()))
                tags["optexp.verdict"] = summary.counted(result.verdict for result in results)
                console = terminal.output()
                console.print("", terminal.sweep_table(ranked), "", sep="\n")
                if study := Study.of(config):
                    note = answer(study, name(config)[:NAME_LIMIT], folder, console, found)
                else:
                    note = overview.markdown(ranked)
                    page.write(name(config), found, folder)
                (folder / filenames.SWEEP_PAGE).write_text(note)
                tags["mlflow.note.content"] = note
                console.print(terminal.locations(folder, _parent))
        finally:
            _finish("FINISHED", folder, tags)


def begin(config: DictConfig) -> None:
    """Claim the sweep's folder and open its MLflow run. A store that cannot be reached costs the record there.

    Raises:
        ConfigError: no folder can be made there.
    """
    global _parent, _folder
    settings = SweepSettings.of(config)
    if not settings.resume:
        own_folder(config, "sweep")
    _folder = Path(config.hydra.sweep.dir)
    if not config.tracking.enabled:
        return
    from optexp.reporting import tracking

    kept = Path(config.hydra.sweep.dir) / tracking.OPEN
    try:
        _parent = _earlier_run(config, kept) if settings.resume else None
        if _parent is None:
            tags = {SWEPT: " ".join(config.hydra.overrides.task), tracking.RECORD: identity(kept.parent)}
            _parent = tracking.start(config.tracking, name(config)[:NAME_LIMIT], tags=tags)
        os.environ[PARENT] = _parent.run_id
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(_parent.run_id)  # for a sweep that continues this one
    except TrackingError as error:
        later = f"python -m optexp.sync {_folder} sends it later, with its jobs"
        print(f"optexp: the sweep is not in MLflow: {error}; {later}", file=sys.stderr)


def identity(folder: Path) -> str:
    """The id of the sweep in a folder, by which a store knows it again; made and kept where there is none."""
    kept = folder / IDENTITY
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(uuid4().hex)
    return kept.read_text()


def _continue_earlier(config: DictConfig) -> None:
    """Let this sweep go on in the folder of the earlier one."""
    from optexp.sweeps import resume

    earlier = resume.earlier_folder(config)
    if earlier is None:
        print("optexp: sweep.resume=true: there is no earlier sweep of these jobs; all are run", file=sys.stderr)
        return
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.sweep.dir = str(earlier)


def _earlier_run(config: DictConfig, kept: Path) -> Run | None:
    """The earlier sweep's MLflow run, open again; None where it had none, or another store has it."""
    from optexp.reporting import tracking

    if not kept.is_file():
        return None
    with suppress(TrackingError):
        return tracking.resume(config.tracking, kept.read_text().strip())
    return None


def abort(status: str = "KILLED") -> None:
    """Close the parent run of a sweep that was interrupted: Hydra makes no callback then."""
    global _folder
    folder, _folder = _folder, None
    if folder is not None and status == "KILLED":
        _rank_so_far(folder)
    _finish(status)


def _rank_so_far(folder: Path) -> None:
    """Print the ranking of the jobs that are done, and write it beside them. No winner is measured again."""
    from optexp.reporting import ranking, summary, terminal
    from optexp.sweeps import selection

    done = [result for job in jobs(folder) if (result := _ended(job)) is not None]
    console = terminal.output()
    if done:
        results = summary.ranked(selection.corrected(done))
        record(results, folder)
        console.print("", terminal.sweep_table(ranking.rows(results)), "", sep="\n")
    of, goes_on = f" of {len(_expected)}" if _expected else "", "the same command with sweep.resume=true does the rest"
    console.print(f"INTERRUPTED: {len(done)}{of} jobs are done, in {folder}; {goes_on}", soft_wrap=True)


def _ended(job: Path) -> Result | None:
    """The record of a job that reached its end."""
    try:
        result = Result.read(job / filenames.RESULT)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if result.error and result.error.type == "Interrupted" else result


def read(folder: Path) -> dict[Path, Result]:
    """Results of the jobs below `folder`; a job without one crashed in a way that nothing could record."""
    records = {job: job / filenames.RESULT for job in jobs(folder)}
    return {job: Result.read(path) if path.is_file() else _lost(job) for job, path in records.items()}


def _again(config: DictConfig, output: Path) -> Result:
    from optexp.comparison import runner

    return runner.run(config, output)


def jobs(folder: Path) -> list[Path]:
    """The folders of the jobs below `folder`, job 2 before job 10."""
    found = [path.parent.parent for path in folder.rglob(filenames.HYDRA_CONFIG)]
    # A folder may hold an older sweep; of launchers other than this package's the times tell it apart.
    recent = [job for job in found if (job / filenames.HYDRA_CONFIG).stat().st_mtime >= _started - 1]
    mine = [job for job in found if job.absolute() in _expected] if _expected else recent
    return sorted(mine, key=lambda job: [int(part) if part.isdecimal() else part for part in _PARTS.split(str(job))])


def record(results: Sequence[Result], folder: Path) -> None:
    """Write the ranking beside the jobs: sweep.json, and pictures where something was measured."""
    from optexp.reporting import ranking
    from optexp.sweeps import overview

    ranked = ranking.rows(results)
    table = [
        {
            "verdict": row.verdict,
            "workload": row.title,
            "strategy": row.strategy,
            "speedup": vars(row.speedup) if row.speedup else None,
            "step_us": row.step_us,
            "peak_mib": row.peak_mib,
            "headline": result.headline,
            "fingerprint": result.fingerprint,
        }
        for result, row in zip(results, ranked, strict=True)
    ]
    (folder / filenames.RANKING).write_text(json.dumps(finite(table), indent=2) + "\n")
    overview.draw(ranked, folder)


def answer(study: Study, name: str, folder: Path, console: Console, results: Mapping[Path, Result]) -> str:
    """Print what a study found and write it down: pages, and a picture. Returns the page without the picture."""
    from optexp.reporting import terminal
    from optexp.sweeps import page
    from optexp.sweeps.plot import draw
    from optexp.sweeps.study import completed, points
    from optexp.sweeps.study_table import markdown

    steps = [str(OmegaConf.select(OmegaConf.load(job / filenames.HYDRA_CONFIG), STEP) or "") for job in jobs(folder)]
    finished = list(zip(results.values(), steps, strict=True))
    study = completed(study, finished)
    found = points(study, finished)
    told = page.Answer.of(study, found)
    console.print(terminal.study_table(study.question, told.heads, told.rows), "", sep="\n")
    for remark in told.remarks:
        console.print(remark, "", sep="\n", soft_wrap=True)
    picture = Path("plots") / f"{name}.png"
    drawn = draw(study, found, folder / picture)
    page.write(name, results, folder, told)
    (folder / filenames.STUDY_PAGE).write_text(markdown(name, study, found, str(picture) if drawn else None))
    return markdown(name, study, found)


def _finish(status: str, folder: Path | None = None, tags: Mapping[str, str] | None = None) -> None:
    global _parent
    run, _parent = _parent, None
    os.environ.pop(PARENT, None)
    if run is None:
        return
    from optexp.reporting import logged

    try:
        if folder is not None:
            run.log_files(folder)
        if tags:
            run.log_batch(tags={name: value[: logged.TAG_LIMIT] for name, value in tags.items()})
    except TrackingError as error:
        print(f"optexp: the ranking is not in MLflow: {error}", file=sys.stderr)
    finally:
        with suppress(TrackingError):  # said above; a store that went away keeps its run open
            run.finish(status)


def name(config: DictConfig) -> str:
    """The study's name, else what was swept."""
    study = OmegaConf.select(config, "hydra.runtime.choices.experiments")
    typed = (text.lstrip("+") for text in config.hydra.overrides.task)
    swept = [text for text in typed if not text.startswith("tracking.")]
    return (str(study) if study and study != "null" else " ".join(swept)) or "sweep"


def _lost(job: Path) -> Result:
    """A record for a job that could not write its own."""
    # Hydra wrote these down before the job began.
    config, hydra = (OmegaConf.load(job / name) for name in (filenames.HYDRA_CONFIG, filenames.HYDRA_SETTINGS))
    return Result(
        verdict=Verdict.ERROR,
        headline=f"ERROR: job {job.name} ended without a result",
        workload=str(hydra.hydra.runtime.choices.workload),
        strategy=[str(name) for name in config.strategy or ()],
        device=str(config.device),
        seed=int(config.seed),
    )
