"""Pause Python's garbage collector while traces and results are read: they are millions of objects, none garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause collection inside the block: visits of all older objects would take two thirds of a trace's reading time.

    Objects outside reference cycles are still freed at once.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
