"""Pause a process with all its descendants: a paused process neither computes nor launches work on a GPU.

A process that counts its pauses knows which of its times hold one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from optexp.support.descent import descendants

STOPPED = "T"  # state in /proc/PID/stat
ROUNDS = 100  # of looking for descendants that were started meanwhile


def pause(pid: int, tell: Callable[[Iterable[int]], object] = lambda pids: None) -> None:
    """Stop a process and all its descendants; those that were started meanwhile are stopped, too.

    One that ended during a look may have started another that this look did not find.

    Args:
        tell: Hears of processes before they are stopped.
    """
    before = set[int]()
    for _ in range(ROUNDS):
        found = {pid, *descendants(pid)}
        running = [each for each in found if _state(each) not in (STOPPED, "Z", "")]
        if not running and found == before:
            return
        tell(running)
        _signal(running, signal.SIGSTOP)
        before = found


def resume(pid: int) -> None:
    """Let a paused process and all its descendants go on."""
    _signal((pid, *descendants(pid)), signal.SIGCONT)


def end(pid: int) -> None:
    """Kill a process and all its descendants. They are paused first: one that starts another and ends, again and again,
    would be gone before it is killed, and outlive all others."""
    pause(pid)
    _signal((*descendants(pid), pid), signal.SIGKILL)


def is_paused(pid: int) -> bool:
    """Whether a process is stopped."""
    return _state(pid) == STOPPED


_count = 0


def count_pauses() -> None:
    """Count pauses of this process from here on; its main thread calls this, and counts them between its calls."""
    signal.signal(signal.SIGCONT, _counted)
    signal.siginterrupt(signal.SIGCONT, False)


def pauses() -> int:
    """How often this process was paused and resumed; 0 where it does not count."""
    return _count


class Used:
    """Seconds of this process from now on. What passes between two looks does not count where it was paused meanwhile:
    a check that ends after a time must not become weaker by that."""

    def __init__(self) -> None:
        self._s, self._at, self._pauses = 0.0, perf_counter(), _count

    def seconds(self) -> float:
        at = perf_counter()
        if _count == self._pauses:
            self._s += at - self._at
        self._at, self._pauses = at, _count
        return self._s


def _counted(number: int, frame: object) -> None:
    global _count
    _count += 1


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _state(pid: int) -> str:
    """A letter; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
