"""ARM: a model that does not take its first batch: one sentence with the user's line and the batch, and no frames."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from optexp.errors import ConfigError, first_line
from optexp.program import Batch, tensors_of
from optexp.support.shortage import is_shortage
from optexp.user_code.adapters import dtype_name

TORCH = f"{Path(torch.__file__).parent}/"
ENGINE = f"{Path(__file__).parents[1]}/"
ANYWHERE = (RuntimeError, ValueError)  # of a line of the user's that calls torch: functions in C++ have no frame
RAISING = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}  # `raise` and `assert`, as they are compiled
IN_TORCH = (*ANYWHERE, IndexError, TypeError, AssertionError)


@contextmanager
def naming_inputs(model: nn.Module, batch: Batch, key: str, converted: Sequence[str] = ()) -> Iterator[None]:
    """Around a call of the user's model on one batch.

    Args:
        key: Where the inputs stem from, as the user names it: workload.inputs, or get_inputs() in file.py.
        converted: Notes on parameters and inputs that have another precision here than in the user's code.

    Raises:
        ConfigError: torch refused what the model gave it. What the user's own code raises passes unchanged.
    """
    try:
        yield
    except NotImplementedError:
        raise
    except IN_TORCH as error:
        frames = _below(error.__traceback__, model)
        if is_shortage(error) or not frames or not _refused(error, frames[-1]):
            raise
        note = f"; {', '.join(converted)}: set dtype= to what the model needs" if converted else ""
        raise ConfigError(
            f"the model cannot take its batch: {_place(frames, model)}: {first_line(error)}; the batch ({key}) is"
            f" {described(batch)}{note}"
        ) from None


def described(batch: Batch) -> str:
    """Shape and dtype of every tensor, by name where it has one."""
    named = tensors_of(batch).items()
    texts = [f"{'' if name.isdigit() else f'{name} '}{list(t.shape)} {dtype_name(t.dtype)}" for name, t in named]
    return ", ".join(texts)


def _below(trace: TracebackType | None, model: nn.Module) -> list[TracebackType]:
    """Frames of a call of the model, the outermost first; none where it was not called."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    called = (index for index, one in enumerate(frames) if one.tb_frame.f_locals.get("self") is model)
    return frames[next(called, len(frames)) :]


def _refused(error: Exception, innermost: TracebackType) -> bool:
    """Whether torch raised it, and no line of the user's."""
    if _file(innermost).startswith(TORCH):
        return True
    return isinstance(error, ANYWHERE) and innermost.tb_frame.f_code.co_code[innermost.tb_lasti] not in RAISING


def _place(frames: list[TracebackType], model: nn.Module) -> str:
    """The innermost line that is not torch's, else the module that was called last."""
    if theirs := [frame for frame in frames if not _file(frame).startswith((TORCH, ENGINE))]:
        last = theirs[-1]
        name = last.tb_frame.f_code.co_name
        return f"{_shown(_file(last))}:{last.tb_lineno}, in {name}, `{_line(last)}`"
    names = {id(module): name or "the model itself" for name, module in model.named_modules()}
    called = [own for frame in frames if id(own := frame.tb_frame.f_locals.get("self")) in names]
    return f"{names[id(called[-1])]} ({type(called[-1]).__name__})"


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _line(frame: TracebackType) -> str:
    return (traceback.extract_tb(frame, 1)[0].line or "").strip()


def _shown(file: str) -> str:
    """Relative to the working folder where it lies there."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
