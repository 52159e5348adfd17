"""Jobs on a Ray cluster that exists: one task each, with a GPU of its own where the cluster has GPUs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from optexp.errors import ConfigError
from optexp.sweeps.job import Job, Surroundings, unpack, work_anywhere
from optexp.sweeps.launchers.engine import Engine


class Ray(Engine):
    """`hydra/launcher=ray`.

    Args:
        address: Of the cluster, as `ray.init` takes it; auto is the one that `ray start` made on this machine.
        num_gpus: That a job reserves; null: 1 where the cluster has GPUs.
        num_cpus: That a job reserves.
    """

    def __init__(self, address: str = "auto", num_gpus: float | None = None, num_cpus: float = 1) -> None:
        self.address, self.num_gpus, self.num_cpus = address, num_gpus, num_cpus

    def workers(self) -> int:
        have, need = self._connected().cluster_resources(), self._needs()
        slots = [
            have.get(name, 0) // need[key] for name, key in (("GPU", "num_gpus"), ("CPU", "num_cpus")) if need[key]
        ]
        return max(1, int(min(slots)))

    def on_gpus(self) -> bool:
        return bool(self._needs()["num_gpus"])

    def run_all(self, jobs: Sequence[Job]) -> None:
        ray = self._connected()
        here = Surroundings.here()
        # A killed task must not be started by Ray as well; a worker that lives serves further jobs.
        remote = ray.remote(max_retries=0, max_calls=0, **self._needs())(work_anywhere)
        pending = {remote.remote(job, here): job for job in jobs}
        try:
            while pending:
                for task in ray.wait(list(pending), num_returns=1)[0]:
                    self._collect(ray, task, pending.pop(task))
        finally:
            for task in pending:
                ray.cancel(task, force=True)

    def _collect(self, ray: Any, task: Any, job: Job) -> None:
        try:
            packed = ray.get(task)
        except ray.exceptions.RayError as error:  # a worker or a node is gone
            print(f"optexp: job {job.number}: {type(error).__name__}", file=sys.stderr)
            return
        if packed is not None:  # the node does not see this folder
            unpack(packed, job.folder)
        self.ended(job)

    def _needs(self) -> dict[str, float]:
        gpus = self.num_gpus
        if gpus is None:
            gpus = 1 if self._connected().cluster_resources().get("GPU") else 0
        return {"num_gpus": gpus, "num_cpus": self.num_cpus}

    def _connected(self) -> Any:
        try:
            import ray
        except ImportError:
            raise ConfigError("hydra/launcher=ray needs Ray: pip install 'optexp[ray]'") from None
        if not ray.is_initialized():
            # Ray's workers are processes of the cluster: they find this package by the same path.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            try:
                ray.init(
                    self.address,
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(f"no Ray cluster at {self.address}: {reason} (start one: ray start --head)") from None
        return ray
