"""Several jobs side by side on this machine: worker processes of joblib's engine (loky)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from optexp.errors import ConfigError
from optexp.sweeps.job import Job, Surroundings, work
from optexp.sweeps.launchers.engine import Engine


class Joblib(Engine):
    """`hydra/launcher=joblib`: one worker for each GPU; `n_jobs` of them where there is none.

    Each worker is an executor of its own. In one common executor, or in `joblib.Parallel`, a worker that is killed
    takes the jobs of all others with it. Jobs choose their GPU by its lock.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        self.n_jobs = n_jobs

    def workers(self) -> int:
        import torch

        count = self.n_jobs or torch.cuda.device_count() or 1
        if count < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={count}: there is at least one worker")
        return count

    def run_all(self, jobs: Sequence[Job]) -> None:
        waiting: SimpleQueue[Job] = SimpleQueue()
        for job in jobs:
            waiting.put(job)
        here = Surroundings.here()
        executors = [_Worker() for _ in range(min(self.workers(), len(jobs)))]
        threads = [Thread(target=self._serve, args=(executor, waiting, here), daemon=True) for executor in executors]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # an interrupt, too, ends the workers, and their arms with them
            _take_all(waiting)
            for executor in executors:
                executor.kill()

    def _serve(self, worker: _Worker, waiting: SimpleQueue[Job], here: Surroundings) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except Empty:
                return
            worker.run(job, here)
            self.ended(job)


def _take_all(waiting: SimpleQueue[Job]) -> None:
    with suppress(Empty):
        while True:
            waiting.get_nowait()


class _Worker:
    """One process that stays warm from job to job, and is made anew after one that was killed."""

    def __init__(self) -> None:
        self.executor: Any = None

    def run(self, job: Job, here: Surroundings) -> None:
        from joblib.externals.loky import ProcessPoolExecutor
        from joblib.externals.loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        if self.executor is None:
            self.executor = ProcessPoolExecutor(max_workers=1)
        try:
            self.executor.submit(work, job, here).result()
        except (BrokenProcessPool, ShutdownExecutorError):  # it was killed, or the sweep is interrupted
            self.kill()
        except Exception as error:  # raised in the worker, which lives on
            print(f"optexp: job {job.number}: {type(error).__name__}: {error}", file=sys.stderr)

    def kill(self) -> None:
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.shutdown(kill_workers=True)
