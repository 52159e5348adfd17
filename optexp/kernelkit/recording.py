"""Calls recorded in a CUDA graph: a replay takes device time, but no time in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from optexp.measurement import clock

rehearsals: list[None] = []  # one entry per active rehearsal; calls of other threads meanwhile count as rehearsed too


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside the block, calls rehearse a graph capture: small calls launch our kernels too, and configs are raced.

    A call that was not rehearsed takes the first config during its capture.
    """
    rehearsals.append(None)
    try:
        yield
    finally:
        rehearsals.pop()


def recorded(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], None]:
    """A function that replays all of these calls from a CUDA graph, which lives as long as the function.

    calls:  calls that have run before, because nothing may be compiled during capture

    Raises:
        RuntimeError: A call cannot be captured; the current stream is restored.
    """
    graph = torch.cuda.CUDAGraph()
    clock.synchronize(device)
    with torch.cuda.stream(_side(device)):
        calls[0]()  # a library's allocations for a new stream must not come from the graph's memory
        clock.synchronize(device)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    return graph.replay


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The same stream for all recordings: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)
