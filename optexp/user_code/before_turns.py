"""State that a marked block learned at turns that gave its batches, put back: compared steps start before them.

Two programs that round differently learn other values in these turns, and would begin apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from optexp.python_state.likeness import equal


class BeforeTurns:
    """Parameters, buffers and state of optimizers among some values, as they are now."""

    def __init__(self, values: Iterable[Any]) -> None:
        held = list({id(value): value for value in values}.values())
        self.modules = [module for value in held if isinstance(value, nn.Module) for module in value.modules()]
        self.optimizers = [value for value in held if isinstance(value, Optimizer)]
        learned = [t for optimizer in self.optimizers for group in optimizer.param_groups for t in group["params"]]
        own = [t for module in self.modules for t in (*module._parameters.values(), *module._buffers.values())]
        tensors = {id(t): t for t in (*learned, *own) if t is not None and not is_lazy(t)}
        self.tensors = [(t, t.detach().clone(), _gradient(t)) for t in tensors.values()]
        self.buffers = [dict(module._buffers) for module in self.modules]
        self.states = [_copied(optimizer, tensors) for optimizer in self.optimizers]

    @torch.no_grad()
    def put_back(self) -> None:
        """Rates and other numbers of the optimizers stay, as their schedules do: rounding moves none of them."""
        for module, buffers in zip(self.modules, self.buffers, strict=True):
            module._buffers.update(buffers)
        for tensor, before, grad in self.tensors:
            if not equal(tensor, before):
                tensor.copy_(before)
            if tensor.is_leaf:
                tensor.grad = grad
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad.clone() if tensor.is_leaf and tensor.grad is not None else None


def _copied(optimizer: Optimizer, tensors: dict[int, Tensor]) -> dict[Any, Any]:
    """A copy of its state that names the same tensors."""
    return copy.deepcopy(dict(optimizer.state), dict(tensors))
