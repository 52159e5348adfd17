"""The optimizer that a user's training step is handed: gradients stay after its step, for comparison."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from optexp.errors import NoReference
from optexp.program import NotCalled, taken_gradients
from optexp.user_code.recorded_steps import Recorded

Gradients = Sequence[Tensor | None]


class Optimizer:
    """The user's optimizer with gradients that stay after its step, for comparison; every step begins without any.

    parameters: all of the model's
    steps:      that were taken since, by calls or by replays of graphs
    taken:      gradients that the last of them took, one of each parameter
    looks:      whether other code writes to them afterwards;  versions: of those, to know that
    copies:     the step may add to gradients after they were taken
    cleared:    zero_grad() was called before them
    zeroed:     parameters whose gradients zero_grad(set_to_none=False) leaves as zeros
    recording:  the graph that records steps instead of taking them
    others:     where other optimizers step, gradients that they take, with versions, by identity of the parameter:
                copies where the step may add to them later, as the loss of an actor does to its critic's
    held:       identities of the parameters of these
    """

    __class__ = property(lambda self: type(self.optimizer))  # type: ignore[assignment]  # to isinstance it is that one

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], looks: bool = False
    ) -> None:
        self.begin(optimizer, parameters, looks)

    def begin(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], looks: bool = False
    ) -> None:
        """Begin a call of the user's function."""
        self.optimizer, self.parameters, self.looks, self.steps = optimizer, parameters, looks, 0
        self.taken: Gradients = ()
        self.recording: Recorded | None = None
        self.versions: list[int] = []
        self.cleared, self.copies, self.zeroed = False, False, list[torch.nn.Parameter]()
        self.others: dict[int, tuple[Tensor, int] | None] = {}
        self.held = set[int]()
        for parameter in parameters:
            parameter.grad = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        taken = self._gradients()
        if any(map(callable, (*args, *kwargs.values()))):  # a closure, which computes them
            result = self.optimizer.step(*args, **kwargs)
            taken = [parameter.grad for parameter in self.parameters]
        else:
            result, copies = taken_gradients.step(self.optimizer, *args, **kwargs)
            if taken_gradients.has_hooks(self.optimizer):  # which may scale gradients, or give others
                taken = [old if new is None else new for old, new in zip(taken, self._gradients(), strict=True)]
            taken = [copies.get(p, gradient) for p, gradient in zip(self.parameters, taken, strict=True)]
        self.versions = [gradient._version for gradient in taken if gradient is not None] if self.looks else []
        if self.recording is None:
            self.steps, self.taken = self.steps + 1, taken
        else:
            self.recording.steps, self.recording.gradients = self.recording.steps + 1, taken
        return result

    def _gradients(self) -> list[Tensor | None]:
        """Those that are there now; copies where the step may add to them later."""
        found = [parameter.grad for parameter in self.parameters]
        return [None if gradient is None else gradient.clone() for gradient in found] if self.copies else found

    def replayed(self, recorded: Recorded) -> None:
        self.steps += recorded.steps
        self.taken = recorded.gradients or self.taken

    @contextmanager
    def others_noted(self) -> Iterator[None]:
        """Inside, note the gradients that other optimizers take, and last those of parameters that none has."""
        _hooked()
        self.held.clear()
        _NOTING.append(self)
        try:
            yield
        finally:
            _NOTING.pop()

    def note(self, other: torch.optim.Optimizer) -> None:
        """Note what another optimizer takes, as its step begins."""
        if other is not self.optimizer:
            own = {id(p): self._versioned(p.grad) for group in other.param_groups for p in group["params"]}
            self.held.update(own)
            self.others |= {id(p): self._versioned(p.grad) for p in self.parameters if id(p) not in self.held} | own

    def _versioned(self, gradient: Tensor | None) -> tuple[Tensor, int] | None:
        if gradient is None:
            return None
        taken = gradient.clone() if self.copies else gradient
        return taken, taken._version

    def take_others(self) -> None:
        """Count the steps of other optimizers, or an update by hand, as one step, if there were any.

        An update by hand takes the gradients that it leaves. Zeros that it leaves are cleared gradients.
        """
        if self.others:
            self.steps += 1
            found = [self.others.get(id(parameter)) for parameter in self.parameters]
            self.taken = [None if each is None else each[0] for each in found]
            self.versions = [each[1] for each in found if each is not None] if self.looks else []
        elif isinstance(self.optimizer, NotCalled) and self.optimizer.by_hand and not self.steps:
            self.steps += 1
            if not any(has_value(p.grad) for p in self.left if p.grad is not None):
                for parameter in self.parameters:
                    parameter.grad = None
            self.taken = [parameter.grad for parameter in self.parameters]

    @property
    def left(self) -> list[torch.nn.Parameter]:
        """Parameters that have gradients now."""
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    @property
    def written(self) -> list[Tensor]:
        """All gradients that the optimizer has taken, where one was written to since; else none."""
        left = [gradient for gradient in self.taken if gradient is not None]
        return left if [gradient._version for gradient in left] != self.versions else []

    def show_gradients(self) -> None:
        """Put gradients back that the step cleared after the optimizer had taken them."""
        for parameter, gradient in zip(self.parameters, self.taken, strict=False):  # no step, no gradients
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def refuse_zeros(self) -> None:
        """Raises NoReference where all gradients were overwritten by zeros after the optimizer had taken them."""
        if self.written and not any(map(has_value, self.written)):
            raise NoReference(
                "train_step writes zeros into gradients after optimizer.step(), so that they cannot be compared: let it"
                " call zero_grad(), or assign None"
            )

    def refuse_leftovers(self) -> None:
        """Raises NoReference where gradients are left that the next step's optimizer would take, too."""
        pairs = zip(self.parameters, self.taken, strict=False)
        if not self.cleared and any(parameter.grad is not None and parameter.grad is not g for parameter, g in pairs):
            raise NoReference(
                "train_step leaves gradients that it computed after optimizer.step() for its next call, and every call"
                " starts without any: let optimizer.step() follow the last backward(), as in `if (i + 1) % 4 == 0`, or"
                " let the step call zero_grad() first"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.recording and self.recording.steps:
            return
        if not self.steps:
            self.cleared = True
            self.optimizer.zero_grad(set_to_none)
            for parameter in self.zeroed if not set_to_none else ():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:  # those that were taken stay what they are
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.optimizer, memo)


_NOTING: list[Optimizer] = []  # the last one notes what other optimizers take


@cache
def _hooked() -> None:
    """Look at the steps of all optimizers from now on: a hook that came and went with each call of the user's function
    would have their compiled steps compiled again, and one that is compiled would be a part of them."""

    def note(other: torch.optim.Optimizer, *_: Any) -> None:
        if _NOTING:
            _NOTING[-1].note(other)

    register_optimizer_step_pre_hook(torch.compiler.disable(note))


def has_value(gradient: Tensor) -> bool:
    """Whether anything in it is not zero."""
    return bool((gradient._values() if gradient.layout is torch.sparse_coo else gradient).any())
