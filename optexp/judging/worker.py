"""WORKER: `python -m optexp.judging.worker` judges jobs one after the other, with one launcher for all of them.

Input: a line with settings, then one request per line. Output: a line when it is ready, then one line for each request,
with the request's secret before the JSON of `optexp.judging.line`. All other prints go to stderr.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf

from optexp import api
from optexp.comparison import runner
from optexp.comparison.quiet import Quiet, Shared
from optexp.config.overrides import rewrite
from optexp.errors import ConfigError
from optexp.judging import line
from optexp.judging.job import READY, Defined, Job, Request, Settings
from optexp.judging.line import Line
from optexp.result import Result
from optexp.schema import suggest
from optexp.user_code import defined_problem
from optexp.user_code.defined_problem import DefinedProblem
from optexp.user_code.definitions import Definition, Solution, filled
from optexp.workers import launching
from optexp.workers.process import die_with_parent

SEED_BITS = 31  # of the parameters' seed, which numpy takes too


def main() -> None:
    """Judge jobs until the input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    launching.launcher()  # imports torch meanwhile
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    quiet = Shared(settings.shared, settings.at_once, again_alone=True) if settings.shared else None
    answers.write(READY + b"\n")
    for text in sys.stdin:
        request = msgspec.json.decode(text, type=Request)
        found = line.encoded(judged(request.job, settings, quiet))
        # A candidate may have written half a line.
        answers.write(f"\n{request.secret} ".encode() + found + b"\n")


def judged(job: Job, settings: Settings, quiet: Quiet | None = None) -> Line:
    """The line of one job. Any failure of a candidate becomes its verdict."""
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="optexp-judge-"))
    output = Path(settings.records, job.key) if settings.records else scratch / "record"
    try:
        refuse_edits(job)
        result = compared(job, settings, scratch, output, quiet)
        refuse_edits(job)
    except ConfigError as mistake:
        return line.failed(job, settings, str(mistake), time.monotonic() - began)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    kept = str(output) if settings.records else None
    result.notes = [note for note in result.notes if str(scratch) not in note]  # notes on removed files
    return line.of(job, settings, result, time.monotonic() - began, kept)


def refuse_edits(job: Job) -> None:
    """Raises ConfigError if a file behind the job's key was changed, by its author or by a candidate."""
    if job.edited:
        raise ConfigError(f"{', '.join(job.edited)} changed after this run began: judge again")


def compared(job: Job, settings: Settings, scratch: Path, output: Path, quiet: Quiet | None = None) -> Result:
    """One comparison.

    Args:
        scratch: Folder for the files of the problem and its solution.
        output: Folder of the record.
        quiet: Where other jobs share the card.

    Raises:
        ConfigError: the job cannot be composed.
    """
    stack, workload = api.members(settings.strategy) or job.strategy, None
    own = ["workload=module"]
    if job.defined is not None:
        workload, own = staged(job.defined, scratch)
        stack = stack or {"replace": _solved(job.defined, scratch)}
    config = api.compose([*own, *asked(settings), *rewrite(list(settings.overrides))], stack, {})
    _set(config, "workload", job.workload)
    return runner.run(config, output, workload, show=lambda *_: None, quiet=quiet)


def asked(settings: Settings) -> list[str]:
    """The settings as overrides, with a random seed of the parameters that no candidate can know.

    Where no record is kept, figures beyond a line's are left out: details of the profile, a third of a job without
    timing, and energy, a second in which the job has the card to itself.
    """
    kept = settings.track or settings.records is not None
    short = [] if kept else ["profile.details=false", "measurement.load_s=0"]
    return [
        f"measurement={settings.preset}",
        f"device={settings.device}",
        f"verify={'only' if settings.verify_only else 'first'}",
        f"timeout_s={settings.timeout_s}",
        f"tracking.enabled={str(settings.track).lower()}",
        f"seed={secrets.randbits(SEED_BITS)}",
        *short,
    ]


def _set(config: DictConfig, prefix: str, values: dict[str, Any]) -> None:
    """Set keys directly, as Hydra's grammar does not accept every path as a value."""
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if isinstance(value, dict):
            _set(config, key, value)
        else:
            OmegaConf.update(config, key, value)


# --- kernel definitions ------------------------------------------------------------------------------------------


def staged(defined: Defined, scratch: Path) -> tuple[DefinedProblem, list[str]]:
    """The workload of a definition, whose files are written into `scratch`, and the override of its precision.

    Raises:
        ConfigError: a dtype is not supported.
    """
    definition = msgspec.json.decode(Path(defined.definition).read_bytes(), type=Definition)
    (scratch / defined_problem.DEFINITION).write_bytes(msgspec.json.encode(definition))
    (scratch / defined_problem.CASE).write_bytes(msgspec.json.encode(defined.case))
    (scratch / defined_problem.REFERENCE).write_text(definition.reference)
    return DefinedProblem(folder=str(scratch), by_name=defined.by_name), [
        f"dtype={defined_problem.precision(definition)}"
    ]


def _solved(defined: Defined, scratch: Path) -> dict[str, Any]:
    """Options of `replace`, which puts a solution in the reference's place."""
    assert defined.solution is not None, "a job has a solution or a strategy"
    path = Path(defined.solution)
    solution = filled(msgspec.json.decode(path.read_bytes(), type=Solution), path.parent)
    folder = scratch / "solution"
    write_sources(solution, folder)
    target = f"{defined_problem.Solved.__module__}:{defined_problem.Solved.__qualname__}"
    return {"target": target, "kwargs": {"folder": str(scratch), "sources": str(folder)}, "of_model": False}


def write_sources(solution: Solution, folder: Path) -> None:
    """Write a solution's files and specification.

    Raises:
        ConfigError: a path leaves the folder, or the entry point is in none of the files.
    """
    names = [source.path for source in solution.sources]
    if solution.spec.file not in names or not solution.spec.function:
        raise ConfigError(f"entry_point={solution.spec.entry_point} names no file::function{suggest('', names)}")
    for source in solution.sources:
        path = (folder / source.path).resolve()
        if folder.resolve() not in path.parents:
            raise ConfigError(f"the source {source.path} would lie outside the solution's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.content)
    (folder / defined_problem.SPEC).write_bytes(msgspec.json.encode(solution.spec))


if __name__ == "__main__":
    main()
