"""OpenMP's threads: after an operation they spin until the next one, some for 0.2 s, and occupy cores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

import torch  # which brings its OpenMP

_SOFT = 1  # omp_pause_soft, https://www.openmp.org/spec-html/5.0/openmpsu157.html
_pause: Callable[[int], int] | None = None
with suppress(OSError, TypeError, AttributeError):  # no such library, or an old one
    _pause = ctypes.CDLL(None).omp_pause_resource_all


def dismiss() -> None:
    """Release the calling thread's OpenMP threads until its next parallel operation.

    With one thread there is nothing to release, and after a fork OpenMP could wait for threads that do not exist.
    """
    if _pause is not None and torch.get_num_threads() > 1:
        _pause(_SOFT)
