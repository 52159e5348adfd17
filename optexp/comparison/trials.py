"""Trials: the comparisons of one job, each with a folder and an MLflow run of its own below the job's.

One launcher forks the processes of all trials.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from optexp.comparison import runner
from optexp.comparison.known_baseline import KnownBaseline
from optexp.comparison.session import Session
from optexp.config.experiment import comparing
from optexp.measurement.settings import MeasurementSettings
from optexp.records import filenames
from optexp.records.trials import Figures, Gain, Trial
from optexp.reporting.terminal import Progress
from optexp.result import ArmSummary, Result, Speedup
from optexp.schema import plain
from optexp.strategy import Composed, Strategy

DECIDED_HERE = ("mode", "strategy", "baseline", "auto", "measurement", "replay")  # keys that a trial sets itself


class Trials:
    """Makes comparisons for one job, one after the other, and counts them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.count = 0

    def compare(
        self,
        stack: Sequence[Strategy],
        against: Sequence[Strategy],
        measurement: MeasurementSettings,
        details: bool = True,
        known_baseline: KnownBaseline | None = None,
        until_s: float = float("inf"),
        longer: bool = False,
        looks: bool = False,
    ) -> tuple[Trial, Result]:
        """Verify and measure `stack` against another.

        Args:
            details: Profile modules, lines and stacks, too, which only the report shows.
            known_baseline: Of `against`, where an earlier comparison of the job verified it.
            until_s: Time of `time.monotonic` at which the trial is cut.
            longer: The same stack was measured briefly before.
            looks: A first look decides whether the stack is verified.
        """
        session, number = self.session, self.count + 1
        self.count = number
        session.pool.end_workers()  # of this job's own: trials measure alone
        experiment = comparing(session.experiment, stack, against, measurement)
        if not details:
            experiment.profile = replace(experiment.profile, details=False)
        if experiment.replay is not None:
            experiment.replay = f"{experiment.replay}/{number}"  # other inputs, the same in every replay
        folder = session.output / filenames.TRIALS / str(number)
        candidate = Composed(stack)
        write_overrides(session.output, folder, candidate, Composed(against), measurement.preset)
        called = "+".join(candidate.labels) or "baseline"
        called += ", measured again for longer" if longer else ""
        progress = Within(session.progress, f"trial {number}", called)
        begin = time.monotonic()
        with session.working("trials", f"{number}: {progress.stack}"):
            result = runner.run_beside(session, experiment, folder, progress, known_baseline, until_s, looks)
        seconds = round(time.monotonic() - begin, 1)
        return replace(of_result(result, number), folder=f"{filenames.TRIALS}/{number}", seconds=seconds), result


def of_result(result: Result, number: int) -> Trial:
    """The trial of a record."""
    against = result.config.get("baseline") or "baseline"
    shows = result.verdict.measured and result.first_look is None
    return Trial(
        number,
        stack=list(result.strategy),
        against=[] if against == "baseline" else str(against).split("+"),
        verdict=result.verdict,
        reason="" if shows else result.headline.removeprefix(result.verdict).lstrip(": "),
        gain=gain(result.speedup),
        candidate=figures(result.candidate),
        baseline=figures(result.baseline),
        p_value=result.measurement.p_value if result.measurement else None,
        preset=str(result.config.get("measurement", "")),
        looked=result.first_look,
    )


def gain(speedup: Speedup | None) -> Gain | None:
    """A trial's gain, whose infinite upper end is None."""
    if speedup is None:
        return None
    return Gain(speedup.estimate, speedup.low, speedup.high if speedup.high < float("inf") else None)


def figures(arm: ArmSummary) -> Figures:
    """A trial's figures of an arm."""
    return Figures(arm.step_us, arm.peak_mib, arm.energy_j, arm.setup_s)


def write_overrides(job: Path, folder: Path, stack: Composed, baseline: Composed, preset: str) -> None:
    """Write the overrides of this trial alone, where Hydra wrote those of the job."""
    typed = job / filenames.HYDRA_OVERRIDES
    if not typed.is_file():
        return
    rest = [text for text in map(str, plain(OmegaConf.load(typed))) if not _decided_here(text)]
    names = ",".join(strategy.name for strategy in stack)
    against = ",".join(f"{{{s.name}:{{{','.join(_pairs(s, ':'))}}}}}" for s in baseline)
    options = [f"strategy.{s.name}.{pair}" for s in stack for pair in _pairs(s, "=")]
    overrides = [*rest, f"strategy=[{names}]", *options, f"baseline=[{against}]", f"measurement={preset}"]
    typed = folder / filenames.HYDRA_OVERRIDES
    typed.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(overrides), typed)


def _decided_here(text: str) -> bool:
    key = text.lstrip("+~").partition("=")[0]
    return key.partition(".")[0] in ("strategy", "baseline", "auto") or key in DECIDED_HERE


def _pairs(strategy: Strategy, between: str) -> list[str]:
    """Options that differ from their defaults, as they are typed."""
    text = strategy.label.removeprefix(strategy.name)[1:-1]
    return [pair.replace("=", between, 1).replace("None", "null") for pair in text.split(",") if pair]


class Within(Progress):
    """The progress of a trial, as part of that of its job, which goes on when the trial ends."""

    def __init__(self, job: Progress, title: str, stack: str) -> None:
        super().__init__(console=job.console)
        self.job, self.title, self.stack = job, title, stack

    def phase(self, name: str, text: str = "") -> None:
        self.job.phase(f"{self.title} ({self.stack})", f"{name}: {text}" if text else name)

    def update(self, text: str, done: int | None = None, total: int | None = None, remaining_s: Any = None) -> None:
        self.job.update(text, done, total)

    def stop(self) -> None:
        """Do nothing: the line is the job's."""
