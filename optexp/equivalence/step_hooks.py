"""REFERENCE: hooks before an optimizer's step, beside an update from gradients that they have changed already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

HOOKS = "_optimizer_step_pre_hooks"


@contextmanager
def changing_numbers_alone(optimizer: Optimizer, numbers: bool) -> Iterator[None]:
    """Inside, hooks before the optimizer's step leave parameters and gradients as they are.

    An observed gradient is the one that the update has taken, scaled or clipped by such a hook.

    Args:
        numbers: Hooks run, and change the numbers of the groups; else these are as the hooks left them.
    """
    hooks = getattr(optimizer, HOOKS, None)
    if not hooks:
        yield
        return

    def run(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        tensors = [*parameters, *(gradient for gradient in gradients if gradient is not None)]
        values = [tensor.detach().clone() for tensor in tensors]
        for hook in hooks.values():
            args, kwargs = hook(optimizer, args, kwargs) or (args, kwargs)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.detach().copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return args, kwargs

    setattr(optimizer, HOOKS, OrderedDict({0: run} if numbers else {}))
    try:
        yield
    finally:
        setattr(optimizer, HOOKS, hooks)
