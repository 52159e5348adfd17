"""OpenMP's threads: after the last operation they look out for the next one, some for 0.2 s, on cores of their own."""

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
    """Let go of those that work for the calling thread, until its next parallel operation.

    Where one thread does all work there are none; after a fork there may seem to be some, and be waited for in vain.
    """
    if _pause is not None and torch.get_num_threads() > 1:
        _pause(_SOFT)
