"""`optexp.steps` and `optexp.step`: marks of a script's step. In a plain run they do nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar


@dataclass(frozen=True)
class Mark:
    """A marked step.

    source:    the iterable of batches in the loop's head; None for `with optexp.step():`
    model:     the module that strategies change; None: the only module in a variable, or the tensors that are trained
    optimizer: the model's optimizer; None in inference, and where no model is named
    every:     iterations of the loop from one optimizer step to the next
    """

    source: Any
    model: Any
    optimizer: Any = None
    every: int = 1


class _Hook:
    """Global state of the marks.

    reached: called at a mark with the frame of its statement; None outside optexp
    made:    file:line of each call of `steps`
    """

    reached: Callable[[Mark, FrameType], None] | None = None
    made: ClassVar[list[str]] = []


def marking() -> bool:
    """Whether this process runs under optexp, where a mark ends the script."""
    return _Hook.reached is not None


def steps(source: Any, *, model: Any = None, optimizer: Any = None, every: int = 1) -> Any:
    """Mark a loop's body as the step: `for batch in optexp.steps(loader, model=model, optimizer=optimizer):`.

    In a plain run this is the loader itself. Under `python -m optexp.run` the script ends at this loop, and its body is
    verified and timed as one step.

    Args:
        source: A loader or another iterable of batches, or a function that makes one batch per call.
        model: The module whose calls in the body strategies change; None: the only module in a variable, with the only
            optimizer.
        optimizer: The model's optimizer, whose `step()` the body calls once; None in inference.
        every: Iterations from one optimizer step to the next, where gradients accumulate over several.
    """
    batches = _endless(source) if callable(source) and not hasattr(source, "__iter__") else source
    if _Hook.reached is None:
        return batches
    frame = sys._getframe(1)
    _Hook.made.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return _Marked(Mark(source, model, optimizer, every), batches)


def step(*, model: Any = None, optimizer: Any = None) -> AbstractContextManager[None]:
    """Mark a block as the step: `with optexp.step(model=model, optimizer=optimizer):`, for loops without a loader.

    The block's batch consists of the tensors that the block reads and that change between iterations; else of those
    that it prefetches, that it optimizes outside the model, or that never change. For the arguments see `steps`.
    """
    if _Hook.reached is not None:
        _Hook.reached(Mark(None, model, optimizer), sys._getframe(1))
    return nullcontext()


def _endless(function: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield function()


class _Marked:
    """A loader whose loop is a mark; all other attributes are the loader's."""

    def __init__(self, mark: Mark, batches: Iterable[Any]) -> None:
        self._mark, self._batches = mark, batches

    def __iter__(self) -> Iterator[Any]:
        if _Hook.reached is not None:
            _Hook.reached(self._mark, sys._getframe(1))
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class stopping_at:  # noqa: N801  # a context manager, named like a function
    """Inside the block, marks call `reached`. Yields a list that collects the file:line of each call of `steps`."""

    def __init__(self, reached: Callable[[Mark, FrameType], None]) -> None:
        self.reached = reached

    def __enter__(self) -> list[str]:
        _Hook.made = []
        _Hook.reached = staticmethod(self.reached)  # type: ignore[assignment]
        return _Hook.made

    def __exit__(self, *error: object) -> None:
        _Hook.reached = None
