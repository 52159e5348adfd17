"""PARENT: workers that share a card. While one of them times a program, all others are paused with their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from optexp.support import file_lock
from optexp.support.pausing import pause, resume

POLL_S = 0.5


class Card:
    """One card and the processes of its workers.

    pids:     of the workers that live
    holder:   the worker that times a program; None while none does
    paused_s: seconds for which a worker was paused or waited for the others, by process id
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.holder: int | None = None
        self.paused_s: dict[int, float] = {}
        self._since = 0.0
        self._lock = Lock()  # is held while somebody times, and while a worker starts

    def begin(self, pid: int, refuse: Callable[[], None]) -> None:
        """Give the card to one worker alone.

        Args:
            refuse: Is called while others have it; what it raises ends the wait.
        """
        asked = time.monotonic()
        while not self._lock.acquire(timeout=POLL_S):
            refuse()
        self.holder, self._since = pid, time.monotonic()
        self.paused_s[pid] = self.paused_s.get(pid, 0.0) + self._since - asked
        for other in self.pids - {pid}:
            pause(other)

    def end(self, pid: int) -> None:
        """Let the others go on, if this worker has the card."""
        if self.holder == pid:
            for other in self.pids - {pid}:
                self.paused_s[other] = self.paused_s.get(other, 0.0) + time.monotonic() - self._since
                resume(other)
            self.holder = None
            self._lock.release()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A process that starts in the block starts while nobody times a program."""
        with self._lock:
            yield


@contextmanager
def claimed(card: str | None, several: bool) -> Iterator[None]:
    """Nobody else's workers share this card meanwhile; they wait for the block's end.

    Args:
        card: As in CUDA_VISIBLE_DEVICES; None on a CPU.
        several: Whether several workers share it here; one alone waits for others job by job.
    """
    path = Path(file_lock.FOLDER, f"optexp-suite-{card}.lock")
    held = None
    while several and (held := file_lock.acquire(path)) is None:
        time.sleep(POLL_S)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)
