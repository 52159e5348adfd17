"""Costs of a sweep, from the records of earlier jobs; no job runs for it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from optexp.comparison.forecast import BESIDE_S, guess
from optexp.config import Experiment, resolve
from optexp.measurement.machine_load import MachineLoad
from optexp.records import filenames
from optexp.support.units import rough
from optexp.sweeps.check import job_of_a_sweep
from optexp.sweeps.job import Job
from optexp.sweeps.start import without_hydra

PLACES = ("multirun", "outputs")  # where the configuration puts records, below the working folder
NEWEST = 1000  # records that are read, at most
FEW = 100  # the same where no plan was asked for
# Settings that decide a job's time besides its workload.
KIND = ("mode", "verify", "measurement", "isolation")


@dataclass(frozen=True)
class Past:
    """An earlier job: its settings, and its seconds without the wait for a GPU."""

    config: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Cost:
    """A job that is due.

    seconds: expected
    basis:   of the expectation, in words
    on_gpu:  it occupies a GPU meanwhile
    """

    job: Job
    workload: str
    seconds: float
    basis: str
    on_gpu: bool


def show(jobs: Sequence[Job], done: int, workers: int, gpus: bool) -> None:
    """Print each job with its expected time, then the sum.

    Args:
        done: Jobs that need not run again.
        workers: Jobs side by side.
        gpus: Jobs find a GPU where they run.
    """
    from optexp.reporting import terminal

    found = costs(jobs, list(history(Path.cwd())), gpus)
    table = Table("job", "workload", "settings", "about", "expected from", box=None, pad_edge=False)
    for cost in found:
        cells = (str(cost.job.number), cost.workload, cost.job.label, rough(cost.seconds), cost.basis)
        table.add_row(*map(Text, cells))
    terminal.output().print(table, "", summary(found, done, workers), sep="\n", soft_wrap=True)


def announce(jobs: Sequence[Job], done: int, workers: int, load: MachineLoad) -> None:
    """Say on stderr before the first job how many there are and how long they take; arguments as those of `show`."""
    found = costs(jobs, list(history(Path.cwd(), FEW)), False)
    if not found:
        if done:
            print(f"optexp: {_nothing(done)}", file=sys.stderr)
        return
    slower_s = len(found) / workers * BESIDE_S * (load.slowdown - 1)
    wall, basis = rough(_wall_s(found, workers) + slower_s), Counter(cost.basis for cost in found)
    parts = [f"{_count(found, workers)}, about {wall} ({basis.most_common(1)[0][0]})", load.text]
    parts += [f"{done} more are done already"] * bool(done)
    print("optexp: " + "; ".join(filter(None, [*parts, "sweep.plan=true lists them"])), file=sys.stderr)


def summary(found: Sequence[Cost], done: int, workers: int) -> str:
    """The sum in one sentence: jobs, wall time, GPU-hours if there are any."""
    if not found:
        return _nothing(done)
    hours = sum(cost.seconds for cost in found if cost.on_gpu) / 3600
    text = f"{_count(found, workers)}: about {rough(_wall_s(found, workers))}"
    text += f" and {hours:.2g} GPU-hours" if hours else ""
    return text + (f"; {done} more are done already" if done else "")


def _nothing(done: int) -> str:
    return f"no job to run: {done} {'is' if done == 1 else 'are'} done already"


def _count(found: Sequence[Cost], workers: int) -> str:
    side_by_side = f", {workers} side by side" if workers > 1 else ""
    return f"{len(found)} job{'s' * (len(found) != 1)}{side_by_side}"


def _wall_s(found: Sequence[Cost], workers: int) -> float:
    return max([sum(cost.seconds for cost in found) / workers, *(cost.seconds for cost in found)]) if found else 0.0


def costs(jobs: Iterable[Job], past: Sequence[Past], gpus: bool) -> list[Cost]:
    """Each job's cost.

    Raises:
        ConfigError: a job's configuration is not allowed.
    """
    return [_cost(job, past, gpus) for job in jobs]


def _cost(job: Job, past: Sequence[Past], gpus: bool) -> Cost:
    experiment = _resolved(job)
    seconds, basis = expected(experiment, past)
    on_gpu = experiment.device.startswith("cuda") or (experiment.device == "auto" and gpus)
    return Cost(job, experiment.workload.name, seconds, basis, on_gpu)


def _resolved(job: Job) -> Experiment:
    with job_of_a_sweep(job.config):
        return resolve(without_hydra(job.config))


def expected(experiment: Experiment, past: Sequence[Past]) -> tuple[float, str]:
    """Seconds of a job, and the records that they are taken from: the most similar ones there are."""
    wanted = experiment.resolved
    same_kind = [job for job in past if all(job.config.get(key) == wanted[key] for key in KIND)]
    levels: tuple[tuple[str, Callable[[Past], bool]], ...] = (
        ("of the same job", lambda job: _equal(job.config, wanted, tuple(wanted))),
        ("of this stack and workload", lambda job: _equal(job.config, wanted, ("workload", "strategy", "baseline"))),
        ("of this workload", lambda job: _equal(job.config, wanted, ("workload",))),
        ("of other workloads", lambda job: True),
    )
    for words, fits in levels:
        if seconds := [job.seconds for job in same_kind if fits(job)]:
            return median(seconds), f"{len(seconds)} record{'s' if len(seconds) > 1 else ''} {words}"
    guessed_s, basis = guess(experiment)
    return guessed_s, f"no record: {basis}"


def _equal(config: Mapping[str, Any], wanted: Mapping[str, Any], keys: Sequence[str]) -> bool:
    ignored = ("device", "seed", "replay")  # a record has the device that was chosen
    chosen = {key: wanted[key] for key in keys if key not in ignored and wanted[key] is not None}  # null: by the device
    return all(_plain(config.get(key)) == _plain(value) for key, value in chosen.items())


def _plain(value: Any) -> Any:
    """As it stands in a record."""
    return json.loads(json.dumps(value, default=str))


def history(folder: Path, most: int = NEWEST) -> Iterator[Past]:
    """Earlier jobs below a working folder, the newest first."""
    files = [file for place in PLACES for file in (folder / place).rglob(filenames.RESULT)]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[:most]:
        try:
            record = json.loads(file.read_text())
            seconds = record["seconds"]["total"] - record["seconds"].get("wait", 0.0)
            if record["verdict"] != "ERROR":
                yield Past(record["config"], seconds)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no record of a job
