"""Processes that this one has paused go on when it ends, however it ended: a paused process cannot notice that."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress

# `kill` of an id that is in use again resumes a process that was not paused, which changes nothing.
AT_END = 'while read -r pid; do pids="$pids $pid"; done; for pid in $pids; do kill -CONT "$pid"; done'


class ResumingAtEnd:
    """A helper process. It resumes every process that `tell` named, when this process ends or calls `close`."""

    def __init__(self) -> None:
        self._told = set[int]()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", AT_END],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True,  # Ctrl-C does not reach it
        )  # fmt: skip

    def tell(self, pids: Iterable[int]) -> None:
        """Name processes before they are paused."""
        new = [pid for pid in pids if pid not in self._told]
        self._told.update(new)
        assert self._process.stdin is not None
        if new:
            with suppress(OSError, ValueError):  # it was killed, or it is closed
                self._process.stdin.write("".join(f"{pid}\n" for pid in new).encode())

    def close(self) -> None:
        """Resume all now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)  # a program may have stopped it
        self._process.wait()
