"""REFERENCE: where a step draws random numbers that no dropout draws: a line of the user's file, and its module."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optexp.python_state.variables import is_users_file


class DrawnAt(TorchDispatchMode):
    """Inside, note the first operator that draws random numbers.

    place: line of the user's file, and the module whose forward reaches it; empty where there is none
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.drawn, self.place = False, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.drawn and torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn, self.place = True, self._place()
        return func(*args, **kwargs or {})

    def _place(self) -> str:
        frames = [*_frames(sys._getframe(2))]
        lines = [frame for frame in frames if is_users_file(frame.f_code.co_filename)]
        if not lines:
            return ""
        file, number = lines[0].f_code.co_filename, lines[0].f_lineno
        held = (frame.f_locals.get("self") for frame in frames)
        inside = [value for value in held if isinstance(value, nn.Module) and id(value) in self.names]
        names = [f", in {self.names[id(value)] or 'the model'} ({type(value).__name__})" for value in inside[:1]]
        return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}{''.join(names)}"


def drawn_at(model: nn.Module, step: Callable[[], object]) -> str:
    """Where a step draws; empty where it does not, or does not run.

    Args:
        model: Of the step, whose modules have names.
    """
    seen = DrawnAt(model)
    try:
        with seen:
            step()
    except Exception:
        return ""
    return seen.place


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
