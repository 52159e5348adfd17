"""REFERENCE: what a step does to parameters beside its optimizer: another optimizer, an update by hand, a norm.

An update is compared with an optimizer step on the arm's own gradients. Changes by other means are no part of that
step; they are taken from the fp64 step as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import rms
from optexp.program import Program
from optexp.support.tolerances import SCARCE

# Of s, RMS and largest: fp64 has gradients of its own, near zero of the other sign, and another Adam makes as large a
# step of those. A change that is a sum of shares of gradient and parameter is as far off as the gradient is.
SIGNS, SHARES = (0.004, 0.5), (0.0005, 0.05)
LINEAR = 1e-3  # of s: what a sum of such shares leaves of a change at most


def allowed(change: Tensor, causes: Sequence[Tensor]) -> tuple[float, float]:
    """The error that any candidate may have in such a change, as shares of its size: RMS and largest.

    change: of a parameter, in fp64
    causes: gradient and parameter before the step, as far as they are known
    """
    if not causes or change.numel() < SCARCE:
        return SIGNS
    columns = torch.stack([cause.to(change).reshape(-1) for cause in causes], 1)
    left = change.reshape(-1) - columns @ torch.linalg.lstsq(columns, change.reshape(-1, 1)).solution[:, 0]
    return SHARES if rms(left) <= LINEAR * rms(change) else SIGNS


@dataclass
class OtherChanges:
    """Of one fp64 step; where the step is not the user's own, of parameters that the model's forward changes.

    start:   the state that the step began with
    updates: by parameter, what `optimizer.step()` changed
    """

    program: Program
    start: Mapping[str, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, the optimizer's step is noted."""
        optimizer = self.program.optimizer
        if optimizer is None:
            yield
            return
        handles = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def found(self) -> dict[str, Tensor]:
        """By parameter, the changes that are not its optimizer's; none where they are zero."""
        if self.program.optimizer is None:
            return {}
        changes = dict[str, Tensor]()
        for name, parameter in self._parameters():
            if not self.program.own_step and name not in self.updates:
                continue
            other = parameter - self._begun(name, parameter) - self.updates.get(name, 0.0)
            if bool(other.any()):
                changes[name] = other
        return changes

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        named = ((name, parameter.detach()) for name, parameter in self.program.model.named_parameters())
        return ((name, tensor) for name, tensor in named if tensor.layout is torch.strided)

    def _begun(self, name: str, parameter: Tensor) -> Tensor:
        return self.start[f"param/{name}"].to(parameter)

    def _before(self, *_: Any) -> None:
        every = self.program.own_step
        moved = ((n, p) for n, p in self._parameters() if every or not torch.equal(p, self._begun(n, p)))
        self.updates = {name: -parameter for name, parameter in moved}

    def _after(self, *_: Any) -> None:
        for name, parameter in self._parameters():
            if name in self.updates:
                self.updates[name] += parameter
