"""Processes that a worker has started, and that those have started: they end with it, and their work is its own."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress


def descendants(pid: int) -> list[int]:
    """The living ones of a process; none where the system does not tell
    (https://docs.kernel.org/filesystems/proc.html)."""
    children: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # tens of threads, at every block that is timed
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:  # or that thread ended
                children += map(int, file.read().split())
    return children + [below for child in children for below in descendants(child)]


def adopt_orphans() -> None:
    """Linux: a descendant whose parent ends becomes a child of this process, and stays a descendant."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
