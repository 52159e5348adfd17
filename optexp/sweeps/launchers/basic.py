"""One job after the other, in the process that sweeps: its launcher of arms stays warm."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from optexp.config.sweep_settings import SweepSettings
from optexp.sweeps import job
from optexp.sweeps.job import Job
from optexp.sweeps.launchers.engine import Engine
from optexp.workers import launching


class Basic(Engine):
    """`hydra/launcher=basic`. Each job prints its whole result, as a single comparison does."""

    def check(self, job_overrides: Sequence[Sequence[str]]) -> None:
        if self.config.get("isolation") != "none" and not SweepSettings.of(self.config).plan:
            launching.launcher()  # imports torch while this process does
        super().check(job_overrides)

    def run_all(self, jobs: Sequence[Job]) -> None:
        for index, each in enumerate(jobs, 1):
            print(f"[{index}/{len(jobs)}] {each.label}", file=sys.stderr, flush=True)
            job.run(each, self.context)
