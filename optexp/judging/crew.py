"""PARENT: worker processes, one or several for each card, that take jobs from one queue. Needs no torch.

A worker that ends or takes too long is replaced. Its job's line states the reason, and the other workers go on.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from select import select
from tempfile import TemporaryFile
from threading import Event
from typing import IO

import msgspec

from optexp.comparison.shared_card import SharedCard, claimed
from optexp.judging.job import READY, Job, Request, Settings
from optexp.judging.line import Line, decoded, failed
from optexp.records.verdict import Verdict
from optexp.support.pausing import end
from optexp.support.shortage import OUT_OF_MEMORY

MODULE = "optexp.judging.worker"
TAIL = 2000  # bytes at the end of a dead worker's log that are read for its last line
POLL_S = 0.5
CHUNK = 65_536  # bytes
START_S = 300.0  # most seconds for a worker's imports, which do not count as a job's time


class Worker:
    """A process that judges jobs.

    visible: its value of CUDA_VISIBLE_DEVICES; None: the variable does not change
    card:    that it shares with other workers; None where it has the card to itself
    """

    def __init__(self, settings: Settings, visible: str | None, card: SharedCard | None, stop: Event) -> None:
        self.settings, self.visible, self.card, self.stop = settings, visible, card, stop
        self.process: subprocess.Popen[bytes] | None = None
        self.log: IO[bytes] | None = None

    def judge(self, job: Job) -> Line:
        """The line of a job. Raises KeyboardInterrupt if the judgement is stopped."""
        began, secret = time.monotonic(), secrets.token_hex()
        process = self._running()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(Request(secret, job)) + b"\n")
            process.stdin.flush()
        try:
            if answer := self._answer(process, self.settings.limit_s, f"{secret} ".encode()):
                return decoded(answer)
            status = process.wait()
            reason = f"the process that compares ended ({_ending(status)}){self._last_words()}"
        except TimeoutError:
            reason = f"no verdict within {self.settings.limit_s:g} s: the job was ended"
        self.close()
        return failed(job, self.settings, reason, time.monotonic() - began)

    def _answer(self, process: subprocess.Popen[bytes], limit_s: float, start: bytes) -> bytes:
        """The first output line that begins with `start`, without `start`; empty if the process ended.

        Other lines come from a candidate, which can write to the worker's pipe but does not know the secret.
        Raises TimeoutError and KeyboardInterrupt.
        """
        assert process.stdout is not None
        deadline, unfinished = self._now(process.pid) + limit_s, b""
        while True:
            if self.stop.is_set():
                raise KeyboardInterrupt
            if self._now(process.pid) > deadline:
                raise TimeoutError
            if not select([process.stdout], [], [], POLL_S)[0]:
                continue
            if not (chunk := os.read(process.stdout.fileno(), CHUNK)):
                return b""
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            if found := next((line for line in lines if line.startswith(start)), None):
                return found.removeprefix(start)

    def _now(self, pid: int) -> float:
        """Seconds of a clock that stands still while other workers of the card make this one wait."""
        return self.card.clock(pid) if self.card else time.monotonic()

    def close(self) -> None:
        """End the process; its arms end with it."""
        if self.process is not None and self.process.poll() is None:
            end(self.process.pid)
            self.process.wait()
        if self.card and self.process:
            self.card.pids.discard(self.process.pid)
        self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.log = TemporaryFile("a+b")  # noqa: SIM115  # lives as long as the process
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            visible = {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}
            with self.card.starting() if self.card else nullcontext():
                self.process = subprocess.Popen(
                    [sys.executable, "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.log,
                    env={**os.environ, "PYTHONPATH": path, **visible},
                    start_new_session=True,
                )
                if self.card:
                    self.card.pids.add(self.process.pid)
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # the process has ended: the job's line will state it
                shared = replace(self.settings, shared=self.card.address if self.card else None)
                self.process.stdin.write(msgspec.json.encode(shared) + b"\n")
                self.process.stdin.flush()
            with suppress(TimeoutError):  # the job will then end in its own timeout
                self._answer(self.process, START_S, READY)
        return self.process

    def _last_words(self) -> str:
        """The last line of the worker's log."""
        if self.log is None:
            return ""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - TAIL))
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def judge_all(
    jobs: Sequence[Job],
    settings: Settings,
    cards: Sequence[str | None],
    done: Callable[[Line], None],
    put_off: Callable[[Line, str], None] = lambda line, reason: None,
) -> None:
    """Judge every job. What several jobs at once on a card may have spoilt is judged again with the card to itself.

    Args:
        cards: Of the workers; see `Worker.visible`.
        done: Called with each line as soon as its job ends, in any thread.
        put_off: Called with a line that others may have spoilt, and the reason.
    """
    alone: SimpleQueue[Job] = SimpleQueue()

    def first(job: Job, line: Line) -> None:
        if reason := spoilt(line):
            alone.put(job)
            put_off(line, reason)
        else:
            done(line)

    if settings.at_once > 1:
        with ExitStack() as held:
            for card in cards:
                held.enter_context(claimed(str(card)))
            shared = [held.enter_context(closing(SharedCard())) for _ in cards]
            _judge(jobs, settings, list(zip(cards, shared, strict=True)) * settings.at_once, first)
        jobs = [alone.get() for _ in range(alone.qsize())]
    _judge(jobs, settings, [(card, None) for card in cards], lambda job, line: done(line))


def spoilt(line: Line) -> str:
    """Why other jobs on the card may be to blame: they take its memory and time, and a timed one may meet their work;
    or ""."""
    slow = line.error == "Timeout" and line.blame != "candidate"
    spoils = line.verdict is Verdict.INVALID or line.error == OUT_OF_MEMORY or slow
    return f"{line.verdict}: {line.reason}" if spoils else ""


def _judge(
    jobs: Sequence[Job],
    settings: Settings,
    places: Sequence[tuple[str | None, SharedCard | None]],
    done: Callable[[Job, Line], None],
) -> None:
    """Judge every job.

    Args:
        places: Of the workers; see `Worker`.
    """
    if not jobs:
        return
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    stop = Event()
    workers = [Worker(settings, visible, card, stop) for visible, card in places[: len(jobs)]]

    def work(worker: Worker) -> None:
        try:
            while not stop.is_set():
                job = queue.get_nowait()
                done(job, worker.judge(job))
        except (Empty, KeyboardInterrupt):
            pass
        finally:
            worker.close()

    with ThreadPoolExecutor(len(workers)) as pool:
        working = [pool.submit(work, worker) for worker in workers]
        try:
            for future in working:
                future.result()
        finally:
            stop.set()  # after an interruption, it ends every worker, so that the pool can end


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
