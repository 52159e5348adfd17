"""Error of hyperparameters in float32: fused and capturable optimizers hold them so, on the device.

The plain optimizer computes with Python's float64. 1 − 0.999 is off by 1.3e-5 in float32, which is far more than the
plain one errs by, and no candidate's fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

UNIT = 2.0**-24


@contextmanager
def in_float32(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer with its real hyperparameters rounded to float32."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rounded, value))
        return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value

    exact = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    coarse = [{key: rounded(value) for key, value in values.items()} for values in exact]
    for group, values in zip(optimizer.param_groups, coarse, strict=True):
        group.update(values)
    try:
        yield
    finally:
        for group, values, given in zip(optimizer.param_groups, exact, coarse, strict=True):
            kept = {key: value for key, value in values.items() if group[key] is given[key]}  # others are counted on
            group.update(kept)


def bias_correction_error(optimizer: torch.optim.Optimizer) -> dict[Tensor, float]:
    """By how much, relative, each parameter's last update moves where 1 − βᵗ is computed in float32.

    Rounding β by u moves βᵗ by t·u; the second moment's correction enters under a root. State that moves along with β
    hides this at the first step (so rounding the betas alone does not show it), where only the correction is rounded.
    """
    moved = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not (steps := int(optimizer.state.get(parameter, {}).get("step", 0))):
                continue
            weights = zip(group.get("betas", ()), (1.0, 0.5), strict=False)
            moved[parameter] = sum(w * steps * UNIT / (1.0 - float(beta) ** steps) for beta, w in weights if beta < 1)
    return moved
