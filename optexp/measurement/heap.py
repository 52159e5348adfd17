"""Freed memory on a CPU: whether glibc keeps it or returns it to the system.

glibc returns the free end of the heap, and the next step faults it in again page by page. Whether this happens depends
on other data at the end of the heap: the same step takes 1.7 ms in one process and 8 ms in another, for all its life.
"""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress

import torch

# https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM, _MAP = ("MALLOC_TRIM_THRESHOLD_", -1), ("MALLOC_MMAP_THRESHOLD_", -3)
NEVER = -1
LARGEST = 32 << 20  # bytes: glibc's highest threshold, above which it maps each tensor separately
PIECE = LARGEST // 2  # bytes


def keep() -> None:
    """Let this process keep freed memory from now on, unless its environment or another allocator decides otherwise."""
    with suppress(OSError, AttributeError):  # not Linux, not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for (variable, parameter), value in ((_TRIM, NEVER), (_MAP, LARGEST)):
            if variable not in os.environ:
                mallopt(parameter, value)


def given() -> int:
    """Bytes of pages that the system has given to this process so far; a page given twice counts twice."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def reserve(size: int) -> None:
    """Grow the heap by at least `size` bytes of resident pages; after `keep`, they stay."""
    held = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(-(-size // PIECE))]
    held.clear()
