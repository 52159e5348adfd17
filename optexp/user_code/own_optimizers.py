"""Training steps with optimizers of their own, or updates by hand, which never call the one that they are given."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from optexp.equivalence.tensor_math import identical
from optexp.program import Batch, NotCalled, Program, preserved
from optexp.support.float64 import InFloat64
from optexp.support.random_state import put_back
from optexp.user_code.train_step import TrainStep


def steps_alone(program: Program, batch: Batch) -> bool:
    """Whether a call of the program's `TrainStep` updates the model without the program's optimizer, a `NotCalled`.

    The `NotCalled` learns whether other optimizers did, or assignments. An error of the user's code is left to the
    first real step.
    """
    step = program.step
    assert isinstance(step, TrainStep)
    assert isinstance(program.optimizer, NotCalled)
    wide = next((p.dtype for p in program.model.parameters()), None) is torch.float64
    model, optimizer = step.hand(program)
    parameters = {name: tensor for name, tensor in program.state().items() if name.startswith("param/")}
    start = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    try:
        arithmetic = InFloat64() if wide else nullcontext()
        with preserved(program), put_back(program.device), arithmetic, optimizer.others_noted():
            step.function(model, step.unpack(batch), optimizer)
            changed = any(not identical(program.state()[name], tensor) for name, tensor in start.items())
    except Exception:
        return False
    finally:
        for parameter in program.model.parameters():
            parameter.grad = None
    program.optimizer.by_hand = changed and not optimizer.steps and not optimizer.others
    return program.optimizer.by_hand or (not optimizer.steps and bool(optimizer.others))
