"""What becomes of a CPU's memory when a tensor is freed.

glibc gives the end of the heap back to the system and asks for it again, page fault by page fault, or does not, by what
else happens to lie there: the same step takes 1.7 ms in one process and 8 in the next, and stays so all its life.
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
LARGEST = 32 << 20  # bytes that glibc would ever take from the heap: above them each tensor is mapped anew anyway
PIECE = LARGEST // 2  # bytes


def keep() -> None:
    """Let this process keep what it frees, for good; where its environment or another allocator decides, that stays."""
    with suppress(OSError, AttributeError):  # not Linux, not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for (variable, parameter), value in ((_TRIM, NEVER), (_MAP, LARGEST)):
            if variable not in os.environ:
                mallopt(parameter, value)


def given() -> int:
    """Bytes in pages that the system has given this process so far; what it took back and gave again counts twice."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def reserve(size: int) -> None:
    """Have at least so many bytes more in the heap, in pages that are there; after `keep`, they stay."""
    held = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(-(-size // PIECE))]
    held.clear()
