"""PARENT: worker processes, one or several for each card, that take jobs from one queue. Needs no torch.

Workers of one card take turns in timing programs (`optexp.judging.card`).
A worker that ends or takes too long is replaced. Its job's line states the reason, and the other workers go on.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from select import select
from tempfile import TemporaryFile
from threading import Event
from typing import IO

import msgspec

from optexp.judging.card import Card, claimed
from optexp.judging.job import GRANTED, NOISE, QUIET, READY, Job, Request, Settings
from optexp.judging.line import Line, decoded, failed
from optexp.records.verdict import Verdict

MODULE = "optexp.judging.worker"
TAIL = 2000  # bytes at the end of a dead worker's log that are read for its last line
POLL_S = 0.5
AT_ONCE, CORES = 4, 4  # most jobs on a card, and fewest cores for each: its arms are set up side by side
CHUNK = 65_536  # bytes
START_S = 300.0  # most seconds for a worker's imports, which do not count as a job's time


class Worker:
    """A process that judges jobs.

    visible: its value of CUDA_VISIBLE_DEVICES; None: the variable does not change
    card:    that it shares with other workers
    """

    def __init__(
        self, settings: Settings, visible: str | None = None, card: Card | None = None, stop: Event | None = None
    ) -> None:
        self.settings, self.visible, self.card, self.stop = settings, visible, card or Card(), stop or Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.log: IO[bytes] | None = None
        self.lines, self.unfinished = deque[bytes](), b""  # of its output, not read yet

    def judge(self, job: Job) -> Line:
        """The line of a job. Raises KeyboardInterrupt if the judgement is stopped."""
        began, secret = time.monotonic(), secrets.token_hex()
        process = self._running()
        until = self._clock(process) + self.settings.limit_s
        self._tell(msgspec.json.encode(Request(secret, job)))
        try:
            while answer := self._answer(process, until, f"{secret} ".encode()):
                if answer == QUIET.encode():
                    self.card.begin(process.pid, self._refuse)
                    self._tell(f"{secret} {GRANTED}".encode())
                elif answer == NOISE.encode():
                    self.card.end(process.pid)
                else:
                    return decoded(answer)
            status = process.wait()
            reason = f"the process that compares ended ({_ending(status)}){self._last_words()}"
        except TimeoutError:
            reason = f"no verdict within {self.settings.limit_s:g} s: the job was ended"
        finally:
            self.card.end(process.pid)
        self.close()
        return failed(job, self.settings, reason, time.monotonic() - began)

    def _clock(self, process: subprocess.Popen[bytes]) -> float:
        """Seconds of a clock that stands still while the process is paused, or waits for others on its card."""
        return time.monotonic() - self.card.paused_s.get(process.pid, 0.0)

    def _answer(self, process: subprocess.Popen[bytes], until: float, start: bytes) -> bytes:
        """The next output line that begins with `start`, without `start`; empty if the process ended.

        Other lines come from a candidate, which can write to the worker's pipe but does not know the secret.
        Raises TimeoutError after `until` by `_clock`, and KeyboardInterrupt.
        """
        assert process.stdout is not None
        while True:
            while self.lines:
                if (line := self.lines.popleft()).startswith(start):
                    return line.removeprefix(start)
            self._refuse()
            if self._clock(process) > until:
                raise TimeoutError
            if not select([process.stdout], [], [], POLL_S)[0]:
                continue
            if not (chunk := os.read(process.stdout.fileno(), CHUNK)):
                return b""
            *lines, self.unfinished = (self.unfinished + chunk).split(b"\n")
            self.lines += lines

    def _refuse(self) -> None:
        """Raises KeyboardInterrupt if the judgement is stopped."""
        if self.stop.is_set():
            raise KeyboardInterrupt

    def _tell(self, text: bytes) -> None:
        """A line for the process."""
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: the job's line will state it
            self.process.stdin.write(text + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the process; its arms end with it."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process is not None:
            self.card.pids.discard(self.process.pid)
        self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.lines, self.unfinished = deque(), b""
            self.log = TemporaryFile("a+b")  # noqa: SIM115  # lives as long as the process
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            visible = {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}
            with self.card.starting():
                self.process = subprocess.Popen(
                    [sys.executable, "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.log,
                    env={**os.environ, "PYTHONPATH": path, **visible},
                    start_new_session=True,
                )
                self.card.pids.add(self.process.pid)
            self._tell(msgspec.json.encode(self.settings))
            with suppress(TimeoutError):  # the job will then end in its own timeout
                self._answer(self.process, self._clock(self.process) + START_S, READY)
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
    jobs: Sequence[Job], settings: Settings, cards: Sequence[str | None], done: Callable[[Line], None]
) -> None:
    """Judge every job. What several jobs at once on a card may have spoilt is judged again with the card to itself.

    Args:
        cards: Of the workers; see `Worker.visible`.
        done: Called with each line as soon as its job ends, in any thread.
    """
    alone: SimpleQueue[Job] = SimpleQueue()

    def first(job: Job, line: Line) -> None:
        if spoilt(line):
            alone.put(job)
        else:
            done(line)

    if settings.at_once > 1:
        with ExitStack() as held:
            for card in cards:
                held.enter_context(claimed(card, several=True))
            _judge(jobs, settings, cards, first)
        jobs, settings = [alone.get() for _ in range(alone.qsize())], replace(settings, at_once=1)
    _judge(jobs, settings, cards, lambda job, line: done(line))


def spoilt(line: Line) -> bool:
    """Whether other jobs on the card may be to blame: they take its memory, and a timed one may meet their work."""
    return line.verdict is Verdict.INVALID or (line.verdict is Verdict.ERROR and "out of memory" in line.reason)


def _judge(
    jobs: Sequence[Job], settings: Settings, cards: Sequence[str | None], done: Callable[[Job, Line], None]
) -> None:
    """Judge every job, so many at once on each card as the settings say."""
    if not jobs:
        return
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    stop = Event()
    shared = [(visible, Card()) for visible in cards]
    workers = [Worker(settings, visible, card, stop) for _ in range(settings.at_once) for visible, card in shared]
    workers = workers[: len(jobs)]

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


def at_once(cards: Sequence[str | None]) -> int:
    """How many jobs a card may have by default: as many as keep it busy, where the host has four cores for each."""
    cores = len(os.sched_getaffinity(0))
    return 1 if list(cards) == [None] else max(1, min(AT_ONCE, cores // (CORES * len(cards))))


def cards(device: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each worker: one card each, or one worker without a card."""
    if device == "cpu":
        return [None]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [card.strip() for card in visible.split(",") if card.strip()] or [None]
    return [str(index) for index in range(_count())] or [None]


def _count() -> int:
    """Cards of this machine, from the driver's library: CUDA itself is not started here."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
