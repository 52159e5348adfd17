"""Python's garbage collector while traces and results are read: millions of objects at once, none of them garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection, which would take two thirds of the time to read a trace: each looks at every older object.

    What no cycle holds is freed at once all the same.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
