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
    """What is called inside is called again while a CUDA graph records it. So ours are launched however small the call,
    and choose among their configs: where a graph records what never ran before, it takes the first config."""
    rehearsals.append(None)
    try:
        yield
    finally:
        rehearsals.pop()


def recorded(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], None]:
    """What makes all of these calls on the device; the graph lives as long as it.

    Each has run before: here nothing may be compiled. RuntimeError where one cannot be captured; the current stream
    is then what it was.
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
