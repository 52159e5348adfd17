"""Runs of a user's code before any step, so that a mistake is one sentence and not the traceback of a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optexp.errors import ConfigError, NoReference, first_line
from optexp.program import (
    STEPS,
    Batch,
    Program,
    ResidentFeed,
    clear_gradients,
    flatten,
    is_training,
    preserved,
    tensors_of,
    to_device,
)
from optexp.support.float64 import InFloat64
from optexp.support.random_state import put_back
from optexp.support.shortage import is_shortage
from optexp.user_code.adapters import shapes
from optexp.user_code.drawn_alike import draws
from optexp.user_code.own_program import OwnProgram

if TYPE_CHECKING:
    from optexp.user_code.workload import UserWorkload


def size_first_layers(own: UserWorkload, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give lazy layers their sizes from a first batch, before any step."""
    if not _lazy(model):
        return
    real = own.in_dtype(own.batch(torch.Generator(device).manual_seed(0)), dtype)
    with own.first_call(model, real):
        _size(_trial(own, model, device), real)


def size_lazy_layers(program: Program) -> None:
    """Give lazy layers of another model their sizes from a batch of the feed."""
    if _lazy(program.model):
        _size(program, to_device(program.feed.next(), program.device))


def _trial(own: UserWorkload, model: nn.Module, device: torch.device) -> Program:
    layout = own.layout
    return OwnProgram(
        model, STEPS["forward"], ResidentFeed(device), targets=own.targets, constants=layout.constants, layout=layout
    )


def _lazy(model: nn.Module) -> bool:
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


def _size(program: Program, batch: Batch) -> None:
    modes = {part: is_training(part) for part in program.model.modules()}
    program.model.eval()
    with torch.no_grad():
        program.predict(batch)
    for part, trains in modes.items():
        part.training = trains


def loss_of_the_model(own: UserWorkload, model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the user's loss finds none in what the model returns without the labels, which the model may take."""
    given, device = own.parts.loss, next((p.device for p in model.parameters()), torch.device("cpu"))
    assert given is not None
    batch = own.in_dtype(own.batch(torch.Generator(device).manual_seed(0)), dtype)
    trial = _trial(own, model, device)
    with preserved(trial), put_back(device), torch.no_grad(), InFloat64() if dtype is torch.float64 else nullcontext():
        try:
            output = trial.predict(batch)
        except Exception:  # left to the first real step
            return False
        try:
            found = given(output, own.layout.unpack(batch))
            return not isinstance(found, torch.Tensor) or found.numel() != 1
        except Exception:
            return True


def draws_by_itself(program: Program, batch: Batch) -> bool:
    """Whether a user's step draws random numbers that are not a dropout's. An error is left to the first real step."""
    wide = next((p.dtype for p in program.model.parameters()), None) is torch.float64

    def run() -> None:
        with preserved(program):
            program.step(program, batch)

    try:
        with InFloat64() if wide else nullcontext():
            return draws(run, program.device)
    except Exception:
        return False
    finally:
        clear_gradients(program.model)


def try_loss(own: UserWorkload, program: Program, dtype: torch.dtype) -> None:
    """Call one of torch's losses once, so that a mistake has no traceback.

    Raises:
        ConfigError: the loss does not take the model's output.
    """
    assert program.loss is not None
    with preserved(program), torch.no_grad():
        batch = own.in_dtype(own.batch(torch.Generator(program.device).manual_seed(0)), dtype)
        with own.first_call(program.model, batch):
            output = program.predict(batch)
        try:
            program.loss(output, batch)
        except ConfigError:
            raise
        except Exception as error:
            if is_shortage(error):
                raise
            labels = list(tensors_of(batch).values())[len(tensors_of(batch)) - program.targets :]
            raise ConfigError(
                f"the loss does not take an output of shape {shapes(flatten(output).values())} with labels of shape"
                f" {shapes(labels)}: {first_line(error)}"
            ) from None


def try_odd(own: UserWorkload, program: Program, dtype: torch.dtype) -> None:
    """Call the model once on an odd number of rows, which it may refuse by itself.

    Raises:
        NoReference: the model refuses that number.
    """
    batch = own.batch(torch.Generator(program.device).manual_seed(0))
    try:
        with preserved(program), InFloat64() if dtype is torch.float64 else nullcontext():
            program.step(program, own.in_dtype(batch, dtype))
    except Exception as error:
        raise NoReference(f"the model does not take {own.leading[0]} rows ({first_line(error)})") from error
    clear_gradients(program.model)
