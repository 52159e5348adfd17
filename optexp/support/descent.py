"""Descendants of a process. A worker's descendants end with it, and their work counts as the worker's."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress


def descendants(pid: int) -> list[int]:
    """Process ids of a process's living descendants; empty where the system does not list them.

    Source: https://docs.kernel.org/filesystems/proc.html
    """
    children: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # fast calls: tens of threads, at every timed block
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:  # a thread may end
                children += map(int, file.read().split())
    return children + [below for child in children for below in descendants(child)]


def adopt_orphans() -> None:
    """Linux: a descendant whose parent ends becomes a child of this process, and stays a descendant."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
