"""REFERENCE: what a step does to parameters beside its optimizer: another optimizer, an update by hand, a norm.

An update is compared with an optimizer step on the arm's own gradients. Changes by other means are no part of that
step; they are taken from the fp64 step as a whole. What a forward changes before an update follows from state and
inputs alone, without a gradient: the update is compared by itself, from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import largest, rms
from optexp.program import Program
from optexp.support.tolerances import SCARCE
from optexp.support.wrapped import is_wrapped

# Of s, RMS and largest: fp64 has gradients of its own, near zero of the other sign, and another Adam makes as large a
# step of those. Of a change that is a sum of shares of gradient and parameter, the gradient's is as far off as it is.
SIGNS, SHARES = (0.004, 0.5), (0.0005, 0.05)
LINEAR = 1e-3  # of s: what a sum of such shares leaves of a change at most


def allowed(change: Tensor, gradient: Tensor | None, parameter: Tensor | None) -> tuple[float, float]:
    """The error that any candidate may have in such a change, as shares of its size: RMS and largest.

    change: of a parameter, in fp64
    gradient, parameter: before the step; None where they are not known
    """
    causes = [cause.to(change).reshape(-1) for cause in (gradient, parameter) if cause is not None]
    if not causes or change.numel() < SCARCE:
        return SIGNS
    columns, whole = torch.stack(causes, 1), change.reshape(-1)
    if not all(bool(part.isfinite().all()) for part in (columns, whole)):
        return SIGNS  # LAPACK refuses NaN
    shares = torch.linalg.lstsq(columns, whole[:, None]).solution[:, 0]
    left = whole - columns @ shares
    if not rms(left) <= LINEAR * rms(change):
        return SIGNS
    if gradient is None:
        return SHARES
    by_gradient = causes[0] * shares[0]  # the parameter's share has no error
    least, most = (
        min(sure, (sure * size(by_gradient) + other * size(left)) / (size(change) or 1.0))
        for sure, other, size in zip(SHARES, SIGNS, (rms, largest), strict=True)
    )
    return least, most


@dataclass
class OtherChanges:
    """Of one fp64 step.

    start:   the state that the step began with
    updates: by parameter, what `optimizer.step()` changed, in a step of the user's own
    begun:   by parameter that forwards of the model changed before it, what they made of `start`
    """

    program: Program
    start: Mapping[str, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)
    begun: dict[str, Tensor] = field(default_factory=dict)
    _entered: dict[str, Tensor] = field(default_factory=dict)  # parameters as a forward began
    _found: list[tuple[int, int]] = field(default_factory=list)  # gradients that it found

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, the optimizer's step is noted."""
        model, optimizer = self.program.model, self.program.optimizer
        if optimizer is None:
            yield
            return
        handles = [optimizer.register_step_pre_hook(_uncopied(self._before))]
        if self.program.own_step:  # which may change parameters before its optimizer's step, too
            handles += [model.register_forward_pre_hook(_uncopied(self._enter))]
            handles += [model.register_forward_hook(_uncopied(self._leave))]
            handles += [optimizer.register_step_post_hook(_uncopied(self._after))]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def found(self) -> dict[str, Tensor]:
        """By parameter, the changes that are neither its optimizer's nor earlier; none where they are zero."""
        if self.program.optimizer is None or not self.program.own_step:
            return {}
        changes = dict[str, Tensor]()
        for name, parameter in self._parameters():
            other = parameter - self._begun(name, parameter) - self.updates.get(name, 0.0)
            if bool(other.any()):
                changes[name] = other
        return changes

    def earlier(self) -> dict[str, Tensor]:
        """By parameter, the changes by forwards before its optimizer's; none where they are zero."""
        return {name: begun - self.start[f"param/{name}"].to(begun) for name, begun in self.begun.items()}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        named = ((name, parameter.detach()) for name, parameter in self.program.model.named_parameters())
        return ((name, tensor) for name, tensor in named if tensor.layout is torch.strided and not is_wrapped(tensor))

    def _begun(self, name: str, parameter: Tensor) -> Tensor:
        return self.begun[name] if name in self.begun else self.start[f"param/{name}"].to(parameter)

    def _enter(self, *_: Any) -> None:
        if not self.updates:
            self._entered = {name: parameter.clone() for name, parameter in self._parameters()}
            self._found = self._gradients()

    def _leave(self, *_: Any) -> None:
        entered, self._entered = self._entered, {}
        if entered and self._gradients() != self._found:
            return  # a backward ran in it, as where a model steps its own optimizer: changes may follow from gradients
        for name, parameter in self._parameters():
            if name in entered and not torch.equal(parameter, entered[name]):
                self.begun[name] = self._begun(name, parameter) - entered[name] + parameter  # exact, if that is 0

    def _gradients(self) -> list[tuple[int, int]]:
        """Keys that distinguish a gradient from another one, or from itself before it was written to."""
        gradients = (parameter.grad for parameter in self.program.model.parameters())
        return [(id(gradient), -1 if gradient is None else gradient._version) for gradient in gradients]

    def _before(self, *_: Any) -> None:
        if self.program.own_step:
            self.updates = {name: -parameter for name, parameter in self._parameters()}
            return
        for name, parameter in self._parameters():
            if not torch.equal(parameter, self._begun(name, parameter)):
                self.begun[name] = parameter.clone()

    def _after(self, *_: Any) -> None:
        for name, parameter in self._parameters():
            self.updates[name] += parameter


def _uncopied(note: Callable[[], None]) -> Callable[..., None]:
    """A hook that a copy of the model shares, as of an averaged one: a method would be copied with all it leads to."""
    return lambda *_: note()
