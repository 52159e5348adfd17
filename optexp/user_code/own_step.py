"""Trial calls of a user's own training step, before it is a step of a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from optexp.program import Batch
from optexp.python_state.slots import Slot
from optexp.support.float64 import InFloat64
from optexp.user_code import inner_optimizer
from optexp.user_code.drawn_alike import Seeded, compiled_code_draws_alike
from optexp.user_code.inner_optimizer import Around
from optexp.user_code.learning import new_optimizer
from optexp.user_code.left_gradients import follow, learn
from optexp.user_code.own_optimizers import steps_alone
from optexp.user_code.own_program import OwnProgram
from optexp.user_code.parameter_attributes import Attributes, follow_attributes
from optexp.user_code.script_step import first_call, unreached
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import TrainStep
from optexp.user_code.trial_runs import draws_by_itself

if TYPE_CHECKING:
    from optexp.user_code.workload import UserWorkload


def with_optimizer(own: UserWorkload, program: OwnProgram, batch: Batch) -> OwnProgram:
    """A program, whose optimizer is a `NotCalled`, with the default one if its step calls the one it is given."""
    assert own.own_step is not None
    if steps_alone(program, batch):
        return program
    assert isinstance(program.step, TrainStep)
    optimizer, step = new_optimizer(own, program.model), replace(program.step, optional=True)
    tracked = own.tracked(own.own_step, program.model, optimizer)
    return replace(program, step=step, optimizer=optimizer, step_state=tracked)


def primed(own: UserWorkload, program: OwnProgram, dtype: torch.dtype) -> OwnProgram:
    """A program whose optimizer has its state; see `inner_optimizer.primed`."""

    def around(outer: Optimizer, name: str) -> OwnProgram:
        assert own.own_step is not None
        inner, step = getattr(outer, name), Around(own.own_step, outer, name)
        state = own.tracked(own.own_step, program.model, inner, aside=(outer,))
        return replace(program, optimizer=inner, step=TrainStep(step, own.layout.unpack), step_state=state)

    def batch() -> Batch:
        return own.in_dtype(own.batch(torch.Generator(program.device).manual_seed(0)), dtype)

    with InFloat64() if dtype is torch.float64 else nullcontext():  # the optimizer may make its state now
        return inner_optimizer.primed(program, around if own.own_step else None, batch)


def tried(
    own: UserWorkload, program: OwnProgram, function: Callable[..., Any], batch: Batch, had: Attributes
) -> OwnProgram:
    """A program with what calls of its step show: gradients that it leaves, its own call of the model, and whether it
    draws random numbers, which are seeded then.

    had: attributes of the model's parameters before any call of its step
    """
    step, state = program.step, program.step_state
    assert isinstance(step, TrainStep)
    assert isinstance(state, TrackedStepState)
    if not own.odd_batch:
        first = first_call(program, lambda: learn(step, program, batch, function, {}))
        program = replace(program, called_with=None if first is None else (first.args, first.kwargs))
        own.remarks += unreached(program, first)
        if note := follow(program, function, {}):
            own.remarks.append(note)
    draws = not step.replays and draws_by_itself(program, batch)
    follow_attributes(state, program.model, had)
    if not draws:
        return program
    own.remarks.append(compiled_code_draws_alike())
    alike = Seeded(step.function)
    state.track(Slot("steps that drew", alike.calls, lambda: alike.calls, alike.put))
    return replace(program, step=replace(step, function=alike))
