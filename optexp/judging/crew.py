"""PARENT: worker processes, one for each card, that take jobs from one queue. Needs no torch.

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
from contextlib import suppress
from queue import Empty, SimpleQueue
from select import select
from tempfile import TemporaryFile
from threading import Event
from typing import IO

import msgspec

from optexp.judging.job import READY, Job, Request, Settings
from optexp.judging.line import Line, decoded, failed

MODULE = "optexp.judging.worker"
TAIL = 2000  # bytes at the end of a dead worker's log that are read for its last line
POLL_S = 0.5
CHUNK = 65_536  # bytes
START_S = 300.0  # most seconds for a worker's imports, which do not count as a job's time


class Worker:
    """A process that judges jobs.

    card: its value of CUDA_VISIBLE_DEVICES; None: the variable does not change
    """

    def __init__(self, settings: Settings, card: str | None = None, stop: Event | None = None) -> None:
        self.settings, self.card, self.stop = settings, card, stop or Event()
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
        deadline, unfinished = time.monotonic() + limit_s, b""
        while True:
            if self.stop.is_set():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise TimeoutError
            if not select([process.stdout], [], [], POLL_S)[0]:
                continue
            if not (chunk := os.read(process.stdout.fileno(), CHUNK)):
                return b""
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            if found := next((line for line in lines if line.startswith(start)), None):
                return found.removeprefix(start)

    def close(self) -> None:
        """End the process; its arms end with it."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.log = TemporaryFile("a+b")  # noqa: SIM115  # lives as long as the process
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            card = {} if self.card is None else {"CUDA_VISIBLE_DEVICES": self.card}
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env={**os.environ, "PYTHONPATH": path, **card},
                start_new_session=True,
            )
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # the process has ended: the job's line will state it
                self.process.stdin.write(msgspec.json.encode(self.settings) + b"\n")
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
    jobs: Sequence[Job], settings: Settings, cards: Sequence[str | None], done: Callable[[Line], None]
) -> None:
    """Judge every job.

    Args:
        cards: The card of each worker; see `Worker`.
        done: Called with each line as soon as its job ends, in any thread.
    """
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    stop = Event()
    workers = [Worker(settings, card, stop) for card in cards[: max(1, len(jobs))]]

    def work(worker: Worker) -> None:
        try:
            while not stop.is_set():
                done(worker.judge(queue.get_nowait()))
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
