"""Optimizer steps inside CUDA graphs that a user's training step records: a replay steps, and calls no optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass
class Recorded:
    """The part of an optimizer that one graph holds.

    steps:     calls of `optimizer.step()` while the graph was recorded; each replay repeats them
    gradients: that the last of them took, one of each parameter of the model
    """

    steps: int = 0
    gradients: list[Tensor | None] = field(default_factory=list)


class Recorder(Protocol):
    """An optimizer that knows whether a graph records its steps.

    recording: the graph that is being recorded; None where steps are taken at once
    """

    recording: Recorded | None

    def replayed(self, recorded: Recorded) -> None:
        """Count steps that a replay has taken."""
        ...


GRAPHS: WeakKeyDictionary[Any, Recorded] = WeakKeyDictionary()  # recorded in this call of a step or in an earlier one


@contextmanager
def watched(optimizer: Recorder) -> Iterator[None]:
    """Inside, tell an optimizer which graph records its steps, and which graph's steps are replayed."""
    kind: Any = torch.cuda.CUDAGraph
    plain: dict[str, Callable[..., None]] = {
        name: getattr(kind, name) for name in ("capture_begin", "capture_end", "replay")
    }

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        plain["capture_begin"](graph, *args, **kwargs)
        optimizer.recording = GRAPHS[graph] = Recorded()

    def capture_end(graph: Any) -> None:
        optimizer.recording = None
        plain["capture_end"](graph)

    def replay(graph: Any) -> None:
        plain["replay"](graph)
        if recorded := GRAPHS.get(graph):
            optimizer.replayed(recorded)

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replay
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(kind, name, method)
