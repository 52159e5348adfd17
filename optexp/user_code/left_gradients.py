"""Gradients that a step leaves for the next one: whether that reads them is tried when the program is built.

Every call starts without gradients. This is what the user's loop does where each step clears them, in whatever way. A
step that adds to those of earlier steps would be judged as another program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from optexp.equivalence.float64 import InFloat64
from optexp.program import Batch, Program, map_batch, preserved
from optexp.python_state.variables import places
from optexp.support.random_state import put_back
from optexp.user_code.train_step import Gradients, TrainStep

CALLS = 3  # consecutive ones that are tried: a step may clear gradients every second time


def learn(step: TrainStep, program: Program, batch: Batch, function: Callable[..., Any], had: Collection[str]) -> None:
    """Find out whether a call of `step` reads gradients of the call before, and tell `step`.

    An error of the user's code is left to the first real step.

    Args:
        batch: Any one.
        function: The user's, whose variables hold other networks.
        had: Names of parameters with gradients before the first step.
    """
    wide = next((p.dtype for p in program.model.parameters()), None) is torch.float64
    others = _others(function, program.model)
    before = {parameter: parameter.grad for parameter in others}
    try:
        with preserved(program), put_back(program.device), InFloat64() if wide else nullcontext():
            step.beginning.adds, step.beginning.called = _adds(step, program, batch, had, others)
            step.beginning.zeros = frozenset(had)
    except Exception:
        step.beginning.adds = False
    for parameter in program.model.parameters():
        parameter.grad = None
    for parameter, gradient in before.items():
        parameter.grad = gradient


def _adds(
    step: TrainStep, program: Program, batch: Batch, had: Collection[str], others: Sequence[nn.Parameter]
) -> tuple[bool, bool]:
    """Whether a call adds to left gradients, whose place NaN takes; and whether the first one called zero_grad()."""
    named, everything = dict(program.model.named_parameters()), [*program.model.parameters(), *others]
    found = step.tried(program, _copy(batch), {named[name]: torch.zeros_like(named[name]) for name in had})
    called, left = found.cleared, set(map(id, found.left))
    step.beginning.left = frozenset(name for name, parameter in named.items() if id(parameter) in left)
    if _spoiled(found.taken, everything):
        return False, called
    for _ in range(CALLS - 1):
        if not any(parameter.grad is not None for parameter in (*(() if found.cleared else found.left), *others)):
            return False, called
        for parameter in others:
            parameter.grad = _poison(parameter)
        begins = {parameter: gradient for parameter in found.left if (gradient := _poison(parameter)) is not None}
        found = step.tried(program, _copy(batch), begins)
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
