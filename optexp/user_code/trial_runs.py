"""Runs of a user's code before any step, so that a mistake is one sentence and not the traceback of a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optexp.equivalence.float64 import InFloat64
from optexp.errors import ConfigError, NoReference, first_line
from optexp.program import (
    STEPS,
    Program,
    ResidentFeed,
    clear_gradients,
    flatten,
    preserved,
    tensors_of,
)
from optexp.user_code.adapters import shapes

if TYPE_CHECKING:
    from optexp.user_code.workload import UserWorkload


def size_lazy_layers(own: UserWorkload, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give lazy layers their sizes from a first batch, before any step."""
    if not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    real = own.in_dtype(own.batch(torch.Generator(device).manual_seed(0)), dtype)
    feed, constants = ResidentFeed(device), own.layout.constants
    with torch.no_grad():
        trial = Program(model.eval(), STEPS["forward"], feed, targets=own.targets, constants=constants)
        with own.first_call(model, real):
            trial.predict(real)
    model.train(own.mode != "forward")


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
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:
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
