"""Calls recorded in a CUDA graph: replayed, they take the device's time and none of Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from optexp.measurement import clock

rehearsals: list[None] = []  # one for each that is under way; what another thread calls meanwhile counts as theirs


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, calls rehearse a graph capture: small ones launch our kernels too, and race their configs.

    A call that never ran before its capture takes the first config.
    """
    rehearsals.append(None)
    try:
        yield
    finally:
        rehearsals.pop()


def recorded(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], None]:
    """A function that replays all of these calls on the device, from a graph that lives as long as the function.

    calls:  each has run before, because nothing may be compiled during capture

    Raises:
        RuntimeError: A call cannot be captured; the current stream is restored.
    """
    graph = torch.cuda.CUDAGraph()
    clock.synchronize(device)
    with torch.cuda.stream(_side(device)):
        calls[0]()  # what a library allocates once for each stream is not to come from the graph's memory
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
    """Always the same: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)
