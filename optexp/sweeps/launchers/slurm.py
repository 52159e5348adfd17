"""Jobs on a SLURM cluster, as one array, submitted by submitit."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optexp.errors import ConfigError
from optexp.sweeps.job import Job, Surroundings, work
from optexp.sweeps.launchers.engine import Engine

FOLDER = "slurm"  # in the sweep's: what submitit writes
LATE_S = 10.0  # a shared file system may show a record so long after the end of its job


class Slurm(Engine):
    """`hydra/launcher=slurm`.

    Args:
        timeout_min: Longest time of a job, in minutes.
        array_parallelism: Jobs that run at once, at most.
        partition, gres, cpus_per_task: As `sbatch` takes them; null: the cluster's default.
        mem_gb: Memory of a job, in GB.
        additional: Further parameters of `sbatch`, without their dashes.
        poll_s: Seconds between two looks at the queue.
    """

    def __init__(
        self,
        timeout_min: int = 60,
        array_parallelism: int = 16,
        partition: str | None = None,
        gres: str | None = None,
        cpus_per_task: int | None = None,
        mem_gb: float | None = None,
        additional: dict[str, Any] | None = None,
        poll_s: float = 2.0,
    ) -> None:
        self.parallelism, self.poll_s = array_parallelism, poll_s
        given = {
            "timeout_min": timeout_min,
            "slurm_partition": partition,
            "slurm_gres": gres,
            "cpus_per_task": cpus_per_task,
            "mem_gb": mem_gb,
            "slurm_additional_parameters": dict(additional or {}),
        }
        self.parameters = {name: value for name, value in given.items() if value is not None}

    def workers(self) -> int:
        return self.parallelism

    def on_gpus(self) -> bool:
        return "gpu" in " ".join(map(str, self.parameters.values()))  # in gres, or among the additional parameters

    def run_all(self, jobs: Sequence[Job]) -> None:
        pending = self._submit(jobs)
        try:
            self._wait(pending)
        finally:
            if pending:
                subprocess.run(["scancel", *pending], check=False)

    def _submit(self, jobs: Sequence[Job]) -> dict[str, Job]:
        """The jobs by their ids in SLURM's queue."""
        try:
            import submitit
        except ImportError:
            raise ConfigError("hydra/launcher=slurm needs submitit: pip install 'optexp[slurm]'") from None
        folder = Path(self.config.hydra.sweep.dir).absolute() / FOLDER
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher=slurm: there is no sbatch here: run it on a node that can submit")
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        executor.update_parameters(name="optexp", slurm_array_parallelism=self.parallelism, **self.parameters)
        here = Surroundings.here()
        return {
            handle.job_id: job
            for handle, job in zip(executor.map_array(work, jobs, [here] * len(jobs)), jobs, strict=True)
        }

    def _wait(self, pending: dict[str, Job]) -> None:
        """Take out each job that has a record, or has left the queue without one, until none is left.

        submitit asks `sacct` for a job's state, which answers nothing where SLURM keeps no accounts: its driver would
        wait for ever for a job that was killed.
        """
        missing_since = dict[str, float]()
        while pending:
            time.sleep(self.poll_s)
            queued = _queued()
            for number, job in list(pending.items()):
                gone = number not in queued
                if gone:
                    missing_since.setdefault(number, time.monotonic())
                if job.record() or (gone and time.monotonic() - missing_since[number] > LATE_S):
                    del pending[number]
                    self.ended(job)


def _queued() -> set[str]:
    """Ids of the user's jobs that wait or run, each job of an array by its own.

    Raises:
        ConfigError: squeue does not answer.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"SLURM's queue cannot be read: {error}") from None
