"""OpenMP's threads: after the last operation they look out for the next one, some for 0.2 s, on cores of their own."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_SOFT = 1  # omp_pause_soft, https://www.openmp.org/spec-html/5.0/openmpsu157.html


def dismiss() -> None:
    """End those that work for the calling thread; its next parallel operation starts others. Nothing without OpenMP."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_pause_resource_all(_SOFT)
