"""Training steps with optimizers of their own, which never call the one that they are given."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from optexp.equivalence.float64 import InFloat64
from optexp.program import Batch, NotCalled, Program, preserved
from optexp.support.random_state import put_back
from optexp.user_code.train_step import TrainStep


def steps_alone(program: Program, batch: Batch) -> bool:
    """Whether a call of the program's `TrainStep` steps other optimizers, and not the program's, a `NotCalled`.

    An error of the user's code is left to the first real step.
    """
    step = program.step
    assert isinstance(step, TrainStep)
    assert isinstance(program.optimizer, NotCalled)
    wide = next((p.dtype for p in program.model.parameters()), None) is torch.float64
    model, optimizer = step.hand(program)
    try:
        arithmetic = InFloat64() if wide else nullcontext()
        with preserved(program), put_back(program.device), arithmetic, optimizer.others_noted():
            step.function(model, step.unpack(batch), optimizer)
    except Exception:
        return False
    finally:
        for parameter in program.model.parameters():
            parameter.grad = None
    return not optimizer.steps and bool(optimizer.others)
