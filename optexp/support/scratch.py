"""Folders for the tensors of one comparison; the folder of a killed process is removed by the next comparison."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "optexp-arms-"
YOUNG_S = 60.0  # younger folders may not be locked yet, and are kept


@dataclass
class Scratch:
    """A folder, and the lock on it that the kernel releases when this process ends."""

    path: str
    lock: int | None

    @classmethod
    def make(cls, place: str) -> Scratch:
        """A new folder in `place`; folders of this user's killed processes there are removed first."""
        remove_left_behind(place)
        path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder and its content. Harmless when called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


def remove_left_behind(place: str) -> None:
    """Remove folders whose process has ended."""
    for path in _old(Path(place).glob(f"{PREFIX}*")):
        with suppress(OSError):  # another user's, or removed meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _old(paths: Iterable[Path]) -> list[Path]:
    found = []
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_S:
                found.append(path)
    return found
