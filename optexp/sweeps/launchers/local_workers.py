"""Several jobs side by side on this machine: worker processes of joblib's engine (loky)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from optexp.comparison import visible_cards
from optexp.comparison.shared_card import SharedCard, claimed
from optexp.errors import ConfigError
from optexp.support.pausing import end
from optexp.sweeps.job import Job, Surroundings, work
from optexp.sweeps.launchers.engine import Engine
from optexp.workers.process import die_with_parent


class Joblib(Engine):
    """`hydra/launcher=joblib`: `at_once` workers for each GPU; `n_jobs` of them where there is none.

    Each worker is an executor of its own. In one common executor, or in `joblib.Parallel`, a worker that is killed
    takes the jobs of all others with it. One worker for each GPU lets jobs choose their GPU by its lock; several on a
    GPU, or on the CPU, share it: one of them times a program at a time.
    """

    def __init__(self, n_jobs: int | None = None, at_once: int = 1) -> None:
        self.n_jobs, self.at_once = n_jobs, at_once

    def workers(self) -> int:
        import torch

        count = self.n_jobs or torch.cuda.device_count() * self.at_once or 1
        if count < 1 or self.at_once < 1:
            name, value = ("n_jobs", self.n_jobs) if self.at_once >= 1 else ("at_once", self.at_once)
            raise ConfigError(f"hydra.launcher.{name}={value}: there is at least one worker")
        return count

    def run_all(self, jobs: Sequence[Job]) -> None:
        with ExitStack() as held:
            self._run_all(jobs, self._places(jobs, held))

    def _places(self, jobs: Sequence[Job], held: ExitStack) -> list[_Place]:
        """Of the workers.

        Raises:
            ConfigError: jobs name the card that their worker is to choose.
        """
        count, on_gpu = min(self.workers(), len(jobs)), self.on_gpus()
        cards = visible_cards.cards("auto") if on_gpu else [None]
        if count == 1 or (on_gpu and self.at_once == 1):
            return [_Place()] * count
        if on_gpu and (named := {str(job.config.device) for job in jobs} - {"auto", "cuda", "cpu"}):
            text = f"hydra.launcher.at_once={self.at_once} gives each worker a card"
            raise ConfigError(f"{text}: leave out device={min(named)}")
        for card in cards if on_gpu else ():
            held.enter_context(claimed(str(card)))
        sharing = -(-count // len(cards))
        places = [_Place(card, held.enter_context(closing(SharedCard())), sharing) for card in cards]
        return [places[index % len(places)] for index in range(count)]

    def _run_all(self, jobs: Sequence[Job], places: Sequence[_Place]) -> None:
        waiting: SimpleQueue[Job] = SimpleQueue()
        for job in jobs:
            waiting.put(job)
        here = Surroundings.here()
        executors = [_Worker(place) for place in places]
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


@dataclass(frozen=True)
class _Place:
    """Of a worker.

    visible: its value of CUDA_VISIBLE_DEVICES; None: it sees all cards
    card:    that it shares with other workers; None: it shares none
    sharing: workers of the card
    """

    visible: str | None = None
    card: SharedCard | None = None
    sharing: int = 1

    def surroundings(self, here: Surroundings) -> Surroundings:
        """Of jobs in this place."""
        visible = {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}
        shared = self.card.address if self.card else None
        return replace(here, variables={**here.variables, **visible}, shared=shared, sharing=self.sharing)


class _Worker:
    """One process that stays warm from job to job, and is made anew after one that was killed.

    pid: of the process that ran the last job
    """

    def __init__(self, place: _Place) -> None:
        self.executor: Any = None
        self.place = place
        self.pid = 0

    def run(self, job: Job, here: Surroundings) -> None:
        from joblib.externals.loky import ProcessPoolExecutor
        from joblib.externals.loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        try:
            self.executor = self.executor or ProcessPoolExecutor(max_workers=1)
            self._meet(self.executor)
            self.executor.submit(work, job, self.place.surroundings(here)).result()
        except (BrokenProcessPool, ShutdownExecutorError):  # it was killed, or the sweep is interrupted
            self.kill()
        except (Exception, SystemExit) as error:  # raised in the worker, which lives on
            print(f"optexp: job {job.number}: {type(error).__name__}: {error}", file=sys.stderr)

    def _meet(self, executor: Any) -> None:
        """Know the process that runs the next job: loky exchanges one that has grown."""
        card = self.place.card
        with card.starting() if card else nullcontext():
            pid = executor.submit(begin, ends_with_sweep=card is not None).result()
            if card:
                card.pids.discard(self.pid)
                card.pids.add(pid)
            self.pid = pid

    def kill(self) -> None:
        if self.place.card:
            self.place.card.pids.discard(self.pid)
        pid, self.pid = self.pid, 0
        executor, self.executor = self.executor, None
        if executor is not None:
            if pid:
                end(pid)
            executor.shutdown(kill_workers=True)


def begin(ends_with_sweep: bool) -> int:
    """Make this process of loky's a worker that stays, and return its id. Before each job, as loky may exchange it.

    ends_with_sweep: it would not notice the end of the process that sweeps while it is paused
    """
    from joblib.externals.loky import process_executor

    process_executor._MAX_MEMORY_LEAK_SIZE = inf  # a job imports torch, which loky would take for a leak
    if ends_with_sweep:
        die_with_parent()
    return os.getpid()
