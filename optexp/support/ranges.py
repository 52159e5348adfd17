"""Named ranges: `with region("attention"):` in a user's code, and the phases of a step; for profiles and for Nsight."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.autograd import profiler

REGION = "optexp.region:"  # prefix of a region's range in a trace; then the region's own name
PHASE = "optexp.phase:"
NVTX = "OPTEXP_NVTX"  # environment variable: 1 emits NVTX ranges from the start, for Nsight tools


class _Switch:
    """on: whether ranges are NVTX ranges too"""

    on = os.environ.get(NVTX, "0") not in ("", "0")


class region:  # noqa: N801  # a context manager, named like a function
    """Mark a part of a program: `with optexp.region("attention"):`.

    While torch's profiler runs, the block is a range in its trace, and optexp makes a table of regions. While optexp
    profiles on a GPU, or with OPTEXP_NVTX=1 in the environment, the block is an NVTX range too. Otherwise the mark does
    nothing. In code that torch.compile traces it marks nothing, and the graph stays whole. Regions may nest.

    Args:
        name: Name of the region, for `profile.region=`.
    """

    __slots__ = ("_range", "name")
    prefix = REGION

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        # While dynamo traces, the first condition is a constant: nothing below becomes a guard or a graph break.
        if torch.compiler.is_compiling() or not (profiler._is_profiler_enabled or _Switch.on):
            self._range = None
            return
        self._range = _open(self.prefix + self.name, self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._range is not None:
            _close(self._range)


class phase(region):  # noqa: N801
    """A part that most steps have: feed, forward, loss, backward, optimizer."""

    __slots__ = ()
    prefix = PHASE


def _open(label: str, name: str) -> tuple[Any, bool]:
    pushed = _Switch.on and torch.cuda.is_initialized()  # `is_available` would take longer than a range
    if pushed:
        torch.cuda.nvtx.range_push(name)
    mark = profiler.record_function(label)
    mark.__enter__()
    return mark, pushed


def _close(opened: tuple[Any, bool]) -> None:
    mark, pushed = opened
    mark.__exit__(None, None, None)
    if pushed:
        torch.cuda.nvtx.range_pop()


@contextmanager
def nvtx(on: bool = True) -> Iterator[None]:
    """Inside the block, ranges are NVTX ranges too."""
    before = _Switch.on
    _Switch.on = on or before
    try:
        yield
    finally:
        _Switch.on = before
