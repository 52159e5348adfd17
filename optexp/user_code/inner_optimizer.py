"""An optimizer around another one, whose own `step()` evaluates the model, as that of SAM does.

SAM moves the parameters along a gradient, takes the gradient there, and moves them back. Its inner optimizer alone
makes an update from given gradients, and is the program's optimizer; all else is work of the user's step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from optexp.errors import NoReference
from optexp.program import Batch, Program, counters, map_batch, preserved, prime
from optexp.support.float64 import InFloat64, is_wide
from optexp.support.random_state import put_back
from optexp.user_code.train_step import TrainStep

CARRIES = (
    "{}.step() evaluates the model itself, by a closure, and a step reads values that an earlier one left in it, beside"
    " those of its {}: these cannot be put back before a step is repeated"
)


@dataclass(frozen=True)
class Around:
    """A training step whose third argument is an optimizer around the program's.

    name: of the attribute of `outer` that holds the program's optimizer
    """

    function: Callable[..., Any]
    outer: Optimizer
    name: str

    def __call__(self, model: Any, batch: Any, optimizer: Any) -> Any:
        inner = getattr(self.outer, self.name)
        setattr(self.outer, self.name, optimizer)
        try:
            return self.function(model, batch, self.outer)
        finally:
            setattr(self.outer, self.name, inner)


def inner_name(outer: Optimizer | None) -> str | None:
    """The attribute that holds the only optimizer of the same tensors; None where there are none or several."""
    held = vars(outer) if isinstance(outer, Optimizer) else {}
    inner = {name: one for name, one in held.items() if isinstance(one, Optimizer) and one is not outer}
    same = [name for name, one in inner.items() if outer is not None and _tensors(one) == _tensors(outer)]
    return same[0] if len(same) == 1 else None


P = TypeVar("P", bound=Program)


def primed(program: P, around: Callable[[Optimizer, str], P] | None, batch: Callable[[], Batch]) -> P:
    """A program whose optimizer has its state; it is the inner one where the given one's step() evaluates the model.

    Args:
        around: The program with the optimizer that this attribute of the given one holds; None where there is no other.
        batch: One to try steps on.

    Raises:
        NoReference: No inner optimizer makes the update, or a step reads what an earlier one left in the outer one.
    """
    outer = program.optimizer
    try:
        prime(program)
        return program
    except NoReference:
        name = inner_name(outer) if around else None
        if name is None or around is None or outer is None:
            raise
    inside = around(outer, name)
    prime(inside)
    refuse_carried(inside, outer, name, batch())
    return inside


def refuse_carried(program: Program, outer: Optimizer, name: str, batch: Batch) -> None:
    """Require that a step reads nothing that an earlier one left in the outer optimizer.

    An error of the user's code is left to the first real step.

    Args:
        program: With the inner optimizer; its step is a `TrainStep`.
        name: Of the attribute that holds it.

    Raises:
        NoReference: a step reads such a value, or changes an attribute.
    """
    assert isinstance(program.step, TrainStep)
    inner = getattr(outer, name)
    shares = all(one is other for one, other in zip(outer.param_groups, inner.param_groups, strict=False))
    counters.meet(outer)
    some, carries, spoiled = next(program.model.parameters(), torch.empty(0)), False, False
    try:
        with preserved(program), put_back(program.device), InFloat64() if is_wide(some) else nullcontext():
            for _ in range(2):
                program.step.tried(program, map_batch(torch.clone, batch), {})
                carries |= bool(counters.counted(outer, followed=shares)) or _spoiled(program)
                _spoil(outer)
                spoiled = True
    except Exception:
        if not spoiled:
            return
        carries = True  # it met the NaN
    finally:
        outer.state.clear()
        for parameter in program.model.parameters():
            parameter.grad = None
    if carries:
        raise NoReference(CARRIES.format(type(outer).__name__, name))


def _tensors(optimizer: Optimizer) -> list[int]:
    return [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]


def _spoil(optimizer: Optimizer) -> None:
    """Let NaN take the place of the state's real numbers; a parameter may share their memory."""
    for entries in optimizer.state.values():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
                entries[key] = torch.full_like(value, torch.nan) if isinstance(value, Tensor) else torch.nan


def _spoiled(program: Program) -> bool:
    held = (tensor for name, tensor in program.state().items() if name.startswith(("param/", "optimizer/")))
    return any(bool(tensor.isnan().any()) for tensor in held if tensor.is_floating_point())
