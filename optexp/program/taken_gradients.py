"""ARM, REFERENCE: gradients as an optimizer's step takes them: after hooks before the step, and before its own writes.

Some optimizers write to gradients: Muon its momentum, others a decay. An fp64 step on gradients that were written to
would apply both twice.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

LOOKS = 3  # steps: the first one may write a momentum that is the gradient itself
WRITES = -1

# By id, as some have no hash: steps of an optimizer without a write, or WRITES.
_LOOKED: dict[int, tuple[ref[torch.optim.Optimizer], int]] = {}


def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> tuple[Any, dict[nn.Parameter, Tensor]]:
    """Take a step. Returns its result, and copies of the gradients that it took, if the optimizer writes to them.

    The optimizer's first steps are looked at.
    """
    looked = _looked(optimizer)
    looks = 0 <= looked < LOOKS and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    if not looks and looked != WRITES:
        return optimizer.step(*args, **kwargs), {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(isinstance(parameter, FakeTensor) for parameter in parameters):  # has no values to compare
        return optimizer.step(*args, **kwargs), {}
    held, taken = dict[nn.Parameter, Tensor](), dict[nn.Parameter, Tensor]()

    def take(*_: Any) -> None:
        held.update({parameter: parameter.grad for parameter in parameters if parameter.grad is not None})
        taken.update({parameter: gradient.clone() for parameter, gradient in held.items()})

    take()
    last = optimizer.register_step_pre_hook(take) if has_hooks(optimizer) else None  # after they have scaled them
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        if last is not None:
            last.remove()
    if looks:
        written = any(not _same(gradient, taken[parameter]) for parameter, gradient in held.items())
        looked = WRITES if written else looked + 1
        key = id(optimizer)
        _LOOKED[key] = ref(optimizer, lambda _: _LOOKED.pop(key, None)), looked
    return result, taken if looked == WRITES else {}


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs hooks before its step, which may change gradients or give others."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def _looked(optimizer: torch.optim.Optimizer) -> int:
    known = _LOOKED.get(id(optimizer))
    return known[1] if known is not None and known[0]() is optimizer else 0


def _same(gradient: Tensor, copy: Tensor) -> bool:
    return gradient.layout is not torch.strided or torch.equal(gradient, copy)
