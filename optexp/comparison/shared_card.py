"""PARENT: worker processes that share a card. One of them times a program at a time; all others are paused meanwhile.

Workers ask over a socket in Linux's abstract namespace, and the kernel says which process asks. Needs no torch.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread

from optexp.comparison.quiet import BEGIN, END, GRANTED
from optexp.support import file_lock
from optexp.support.pausing import pause, resume
from optexp.support.resuming_at_end import ResumingAtEnd

POLL_S = 0.5


class SharedCard:
    """One card, and the worker processes on it. Workers ask by a `Shared` of this address.

    pids: of the workers; others are not heard
    """

    def __init__(self) -> None:
        self.address, self.pids = f"optexp-card-{secrets.token_hex()}", set[int]()
        self._holder: int | None = None
        self._lock = Lock()  # is held while a comparison times, and while a worker starts
        self._closed = False
        self._clocks = Lock()
        self._paused_s: dict[int, float] = {}
        self._still: dict[int, float] = {}  # since when a worker has waited or been paused
        self._resuming = ResumingAtEnd()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()
        Thread(target=self._accept, daemon=True).start()

    def clock(self, pid: int) -> float:
        """Seconds of a clock that stands still while a worker is paused, or waits for others."""
        with self._clocks:
            return self._still.get(pid, time.monotonic()) - self._paused_s.get(pid, 0.0)

    def _stands(self, pid: int) -> None:
        with self._clocks:
            self._still.setdefault(pid, time.monotonic())

    def _goes_on(self, pid: int) -> None:
        with self._clocks:
            now = time.monotonic()
            self._paused_s[pid] = self._paused_s.get(pid, 0.0) + now - self._still.pop(pid, now)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A worker that starts in the block starts while no comparison times a program."""
        with self._lock:
            yield

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # `accept` returns
        self._socket.close()
        self._resuming.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", credentials)[0]
        try:
            with connection, suppress(OSError):
                while pid in self.pids and (asked := connection.recv(1)):
                    if asked == BEGIN and self._begin(pid):
                        connection.sendall(GRANTED)
                    elif asked == END:
                        self._end(pid)
        finally:
            self._end(pid)  # it may have ended while it timed

    def _begin(self, pid: int) -> bool:
        """Pause all other workers once none of them times a program; False after `close`."""
        self._stands(pid)
        while not self._lock.acquire(timeout=POLL_S):
            if self._closed:
                return False
            self._stands(pid)  # the one before has let all go on
        self._holder = pid
        self._goes_on(pid)
        for other in self.pids - {pid}:
            self._stands(other)
            pause(other, tell=self._resuming.tell)
        return True

    def _end(self, pid: int) -> None:
        if self._holder == pid:
            for other in self.pids - {pid}:
                resume(other)
                self._goes_on(other)
            self._holder = None
            self._lock.release()


@contextmanager
def claimed(card: str) -> Iterator[None]:
    """No other process shares out this card meanwhile; it waits for the block's end.

    Args:
        card: As in CUDA_VISIBLE_DEVICES.
    """
    path = Path(file_lock.FOLDER, f"optexp-shared-{card}.lock")
    while (held := file_lock.acquire(path)) is None:
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(held)
