"""Base of all engines: jobs that are due, jobs whose worker was killed, and printed lines."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from optexp.config.sweep_settings import SweepSettings
from optexp.errors import TrackingError
from optexp.sweeps import resume, sweep
from optexp.sweeps.check import prepared
from optexp.sweeps.job import Job


class Engine(Launcher):
    """A launcher whose jobs end in records, whatever happens to its workers.

    A subclass runs jobs in `run_all`, calls `ended` for each, and need not care for workers that are killed: a job
    without a record is started again, `sweep.attempts` times in all.
    """

    config: DictConfig
    context: HydraContext
    folders: list[Path]  # of the last launch's jobs, in their order
    announces = False  # how long a launch takes: its jobs are all there are

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        self._ended, self._count, self._taken = 0, 0, set[str]()
        self._known = dict[tuple[str, ...], DictConfig]()

    @abstractmethod
    def run_all(self, jobs: Sequence[Job]) -> None:
        """Start all jobs and return when each has ended, with or without a record.

        Raises:
            ConfigError: the engine is not installed, or cannot be reached.
        """

    def workers(self) -> int:
        """Jobs that run side by side."""
        return 1

    def on_gpus(self) -> bool:
        """Whether jobs find a GPU where they run."""
        import torch

        return torch.cuda.is_available()

    def check(self, job_overrides: Sequence[Sequence[str]]) -> None:
        """Look at all jobs of a sweep before the first one starts, and remember their configurations for `launch`.

        Raises:
            ConfigError: one of them has a mistake.
        """
        self._known = prepared([self._load(overrides) for overrides in job_overrides], job_overrides)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; results are read from their folders, so nothing is returned."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        settings = SweepSettings.of(self.config)
        folder = Path(self.config.hydra.sweep.dir).absolute()
        done = resume.finished(folder) if settings.resume else {}
        composed = self._composed(job_overrides, folder)
        once = {job.key: job for job in reversed(composed)}  # of equal jobs the first
        different = [job for job in composed if once[job.key] is job]
        if same := len(composed) - len(different):
            words = "1 job is the same as another" if same == 1 else f"{same} jobs are the same as others"
            print(f"optexp: {words}: run once", file=sys.stderr)
        jobs, taken_over = self._numbered(different, done, initial_job_idx)
        places = {job.key: job.folder for job in jobs} | taken_over
        self.folders = [places[job.key] for job in composed]
        if settings.plan:
            from optexp.sweeps import plan

            plan.show(jobs, len(taken_over), self.workers(), self.on_gpus())
            return []
        folder.mkdir(parents=True, exist_ok=True)
        for path in taken_over.values():
            sweep.expect(path)
        if self.announces:
            from optexp.measurement.machine_load import MachineLoad
            from optexp.sweeps import plan

            plan.announce(jobs, len(taken_over), self.workers(), MachineLoad.now())
        elif taken_over:
            print(f"optexp: done already: {len(taken_over)}; left: {len(jobs)}", file=sys.stderr)
        self._run(jobs, settings.attempts)
        return []

    def _composed(self, job_overrides: Sequence[Sequence[str]], folder: Path) -> list[Job]:
        """All jobs, before the first one starts: a mistake in the last one must not cost the others' time."""
        jobs = []
        for overrides in job_overrides:
            config = self._known.get(tuple(overrides)) or self._load(overrides)
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.sweep.dir = str(folder)  # of an earlier sweep, where one is resumed
            jobs.append(Job(0, config, folder, resume.key(config)))
        return jobs

    def _load(self, overrides: Sequence[str]) -> DictConfig:
        return self.context.config_loader.load_sweep_config(self.config, list(overrides))

    def _numbered(
        self, composed: Sequence[Job], done: dict[str, Path], first: int
    ) -> tuple[list[Job], dict[str, Path]]:
        """Jobs that are due, each with a folder of its own; and the folders of finished jobs by key."""
        finished = {job.key: done[job.key] for job in composed if job.key in done}
        occupied = self._taken | {path.name for path in done.values()}
        spare = (number for number in count(first + len(composed)) if str(number) not in occupied)
        jobs = [
            self._placed(job, next(spare) if str(number) in occupied else number)
            for number, job in enumerate(composed, first)
            if job.key not in finished
        ]
        self._taken |= {job.folder.name for job in jobs}  # a sweep may launch several batches
        return jobs, finished

    def _placed(self, job: Job, number: int) -> Job:
        config = job.config
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.id = config.hydra.job.num = number
        folder = job.folder / str(OmegaConf.select(config, "hydra.sweep.subdir"))
        return Job(number, config, folder, job.key)

    def _run(self, jobs: Sequence[Job], attempts: int) -> None:
        self._ended, self._count = 0, len(jobs)
        for job in jobs:
            sweep.expect(job.folder)
            job.unmark()  # of an earlier sweep that did the same, or of an error
        due = list(jobs)
        for attempt in range(attempts):
            if attempt:
                print(f"optexp: {_listed(due)} ended without a record: started again", file=sys.stderr)
            try:
                self.run_all(due)
            except BaseException:  # an interrupt, which ends the workers
                self._close_runs(due)
                raise
            due = [job for job in due if job.record() is None]
            if not due:
                break
        for job in due:
            job.write_config()
        self._close_runs(due)
        self._log_what_workers_could_not(jobs)

    def ended(self, job: Job) -> None:
        """Print what became of a job that ran in a worker."""
        if result := job.record():
            self._ended += 1
            print(f"[{self._ended}/{self._count}] {result.workload} · {result.label}: {result.headline}", flush=True)

    def _close_runs(self, jobs: Iterable[Job]) -> None:
        """Close the MLflow runs of jobs that left no record."""
        from optexp.reporting import tracking

        for job in jobs:
            if job.record() is None:
                tracking.close_left_open(self.config.tracking, job.folder)

    def _log_what_workers_could_not(self, jobs: Iterable[Job]) -> None:
        """Log records whose workers could not reach the store."""
        from optexp.reporting import tracking

        parent = sweep.parent_run_id()
        for job in jobs if parent else ():
            if (result := job.record()) and result.config and "mlflow_run" not in result.environment:
                try:
                    tracking.log_later(self.config.tracking, result, job.folder, parent)
                except TrackingError as error:
                    print(f"optexp: job {job.number} is not in MLflow: {error}", file=sys.stderr)
                    return


def _listed(jobs: Sequence[Job]) -> str:
    numbers = ", ".join(str(job.number) for job in jobs[:10])
    return f"job{'s' if len(jobs) > 1 else ''} {numbers}{', …' if len(jobs) > 10 else ''}"
