"""Gradients that a step leaves for the next one: whether that reads them is tried when the program is built.

Calls start without gradients where each step clears them, in whatever way. Those that the next step reads are state: a
call finds them as the call before left them, and they are put back and compared as other state is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optexp.program import Batch, Program, map_batch, preserved
from optexp.python_state.slots import Slot
from optexp.python_state.variables import places
from optexp.support.float64 import InFloat64
from optexp.support.random_state import put_back
from optexp.user_code.handed_optimizer import Gradients
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import TrainStep

CALLS = 3  # consecutive ones that are tried: a step may clear gradients every second time,
MORE, MORE_S = 9, 0.5  # or leave them every eighth time, which is looked for where it takes no longer


def learn(
    step: TrainStep, program: Program, batch: Batch, function: Callable[..., Any], had: Mapping[str, Tensor]
) -> None:
    """Find out whether a call of `step` reads gradients of the call before, and tell `step`.

    An error of the user's code is left to the first real step.

    Args:
        batch: Any one.
        function: The user's, whose variables hold other networks.
        had: Gradients before the first step, by name of the parameter.
    """
    wide = next((p.dtype for p in program.model.parameters()), None) is torch.float64
    if step.replays:
        return  # its object counts calls until it records a graph
    others = _others(function, program.model)
    step.beginning.later = _steps_others(function, program)  # in some calls, maybe, which are not tried
    before = {parameter: parameter.grad for parameter in others}
    try:
        with preserved(program), put_back(program.device), InFloat64() if wide else nullcontext():
            step.beginning.adds, step.beginning.called = _adds(step, program, batch, had, others)
            step.beginning.zeros = frozenset(had)
        step.beginning.unread = not step.beginning.adds
    except Exception:
        step.beginning.adds = False
    if step.beginning.adds:
        held = sorted(step.beginning.left | had.keys())
        step.beginning.kept = {name: torch.zeros_like(program.model.get_parameter(name)).detach() for name in held}
    for parameter in program.model.parameters():
        parameter.grad = None
    for parameter, gradient in before.items():
        parameter.grad = gradient


def follow(program: Program, function: Callable[..., Any], had: Mapping[str, Tensor]) -> str:
    """Make gradients that steps read state of the program. Returns a note; an empty one where they read none.

    Args:
        function, had: As `learn` takes them.
    """
    step, state = program.step, program.step_state
    if not (isinstance(step, TrainStep) and isinstance(state, TrackedStepState) and step.beginning.adds):
        return ""
    kept, others = step.beginning.kept, _others(function, program.model)
    for name, tensor in kept.items():
        tensor.copy_(had[name]) if name in had else tensor.zero_()  # trial runs have left theirs
    state.track(Slot("gradients", kept, partial(_read, kept), partial(_write, kept)))
    if others:
        state.track(Slot("gradients of other networks", others, partial(_read_of, others), partial(_write_of, others)))
    return "steps add to gradients that earlier steps left (no zero_grad()): these are state of a step"


def _read(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in kept.items()}


@torch.no_grad()
def _write(kept: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in saved.items():
        kept[name].copy_(tensor)


def _read_of(others: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    return {str(i): p.grad.to_dense().clone() for i, p in enumerate(others) if p.grad is not None}


def _write_of(others: Sequence[nn.Parameter], saved: Mapping[str, Tensor]) -> None:
    for index, parameter in enumerate(others):
        gradient = saved.get(str(index))
        parameter.grad = None if gradient is None else gradient.to(parameter).clone()


def _adds(
    step: TrainStep, program: Program, batch: Batch, had: Mapping[str, Tensor], others: Sequence[nn.Parameter]
) -> tuple[bool, bool]:
    """Whether a call adds to left gradients, whose place NaN takes; and whether the first one called zero_grad()."""
    named, everything = dict(program.model.named_parameters()), [*program.model.parameters(), *others]
    found = step.tried(program, _copy(batch), {named[name]: torch.zeros_like(named[name]) for name in had})
    called, left = found.cleared, set(map(id, found.left))
    step.beginning.later |= found.later
    step.beginning.left = frozenset(name for name, parameter in named.items() if id(parameter) in left)
    if _spoiled(found.taken, everything):
        return False, called
    began = monotonic()
    for number in range(1, MORE):
        leaves = any(parameter.grad is not None for parameter in (*(() if found.cleared else found.left), *others))
        if (found.cleared and not leaves) or (number >= CALLS and (found.cleared or monotonic() - began > MORE_S)):
            return False, called
        for parameter in others:
            parameter.grad = _poison(parameter)
        begins = {parameter: gradient for parameter in found.left if (gradient := _poison(parameter)) is not None}
        found = step.tried(program, _copy(batch), begins)
        left |= set(map(id, found.left))
        step.beginning.left = frozenset(name for name, parameter in named.items() if id(parameter) in left)
        if _spoiled(found.taken, everything):
            return True, called
    return False, called


def _poison(parameter: Tensor) -> Tensor | None:
    """NaN in the place of its gradient; zeros stay, as they add nothing."""
    gradient = parameter.grad
    if gradient is None or not bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any()):
        return gradient
    return torch.full_like(parameter, torch.nan)


def _spoiled(gradients: Gradients, parameters: Iterable[nn.Parameter]) -> bool:
    tensors = [*(gradient for gradient in gradients if gradient is not None), *(p.detach() for p in parameters)]
    return any(bool((t.coalesce().values() if t.is_sparse else t).isnan().any()) for t in tensors if _real(t))


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(batch: Batch) -> Batch:
    return map_batch(torch.clone, batch)


def _steps_others(function: Callable[..., Any], program: Program) -> bool:
    """Whether the function names another optimizer: losses of other networks may add to the model's gradients."""
    values = [place.get() for place in places(function)]
    return any(isinstance(value, Optimizer) and value is not program.optimizer for value in values)


def _others(function: Callable[..., Any], model: nn.Module) -> list[nn.Parameter]:
    """Parameters of other networks that the function names."""
    own, found = set(map(id, model.parameters())), dict[int, nn.Parameter]()
    for place in places(function):
        value = place.get()
        several = value.values() if isinstance(value, Mapping) else value
        for module in several if isinstance(value, (Mapping, list, tuple)) else (value,):
            if isinstance(module, nn.Module):
                found |= {id(p): p for p in module.parameters() if id(p) not in own}
    return [*found.values()]
