"""A training step that the user wrote, as a step of a program: strategies and verification still reach in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from optexp.errors import NoReference, Unsupported
from optexp.program import Batch, Outputs, Program, flatten, others
from optexp.python_state.variables import records_graphs
from optexp.user_code.recorded_steps import Recorded, watched


@dataclass(frozen=True)
class TrainStep:
    """A step by the user's `function(model, batch, optimizer)`, which returns the loss, other values, or nothing.

    unpack: a batch as the user's own loader gives it
    model:  the model as the function sees it
    met:    programs whose first step has shown that it leaves values in gradients, or drops them whole
    """

    function: Callable[..., Any]
    unpack: Callable[[Batch], Any]
    model: Callable[[Program, Optimizer], Any] = lambda program, optimizer: Model(program, optimizer)
    met: WeakSet[torch.nn.Module] = field(default_factory=WeakSet, compare=False)

    @cached_property
    def replays(self) -> bool:
        """Whether it is an object that records CUDA graphs: a replay calls no optimizer, and steps all the same."""
        return records_graphs(type(self.function))

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        if program.scaler is not None:
            raise Unsupported(
                "train_step calls backward() itself, where a GradScaler cannot reach: use strategy.amp.dtype=bfloat16"
            )
        is_first = program.model not in self.met
        optimizer = Optimizer(program.optimizer, [*program.model.parameters()], looks=is_first)
        with watched(optimizer) if self.replays else nullcontext():
            result = self.function(self.model(program, optimizer), self.unpack(batch), optimizer)
        if is_first:
            optimizer.refuse_zeros()
            optimizer.refuse_leftovers()
            self.met.add(program.model)
        optimizer.show_gradients()
        if not optimizer.steps and not _finite(program.model):
            raise NoReference(
                "train_step left its optimizer step out because gradients overflow, as a GradScaler does: let it start"
                " with a smaller scale (init_scale=)"
            )
        if optimizer.steps != 1:
            how = ", in replays of CUDA graphs too," if self.replays else ""
            raise NoReference(
                f"train_step called optimizer.step(){how} {optimizer.steps} times: a call must be one whole optimizer"
                " step (accumulate over parts of the batch inside it; at a mark, every=4 takes four iterations,"
                " and a loop must go on for any number of steps)"
            )
        return self._outputs(result)

    @staticmethod
    def _outputs(result: Any) -> Outputs:
        tensors = {name: tensor.detach() for name, tensor in flatten(result, "loss").items()}
        return tensors | others(result, "loss")


def _finite(model: torch.nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def _has_value(gradient: Tensor) -> bool:
    """Whether anything in it is not zero."""
    return bool((gradient._values() if gradient.layout is torch.sparse_coo else gradient).any())


class Optimizer:
    """The user's optimizer with gradients that stay after its step, for comparison; every step begins without any.

    parameters: all of the model's
    steps:      that were taken since, by calls or by replays of graphs
    taken:      gradients that the last of them took, one of each parameter
    looks:      whether somebody writes to them afterwards;  versions: of those, to know that
    cleared:    zero_grad() was called before them
    recording:  the graph that records steps instead of taking them
    """

    __class__ = property(lambda self: type(self.optimizer))  # type: ignore[assignment]  # to isinstance it is that one

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], looks: bool = False
    ) -> None:
        self.optimizer, self.parameters, self.looks, self.steps = optimizer, parameters, looks, 0
        self.taken: Sequence[Tensor | None] = ()
        self.recording: Recorded | None = None
        self.versions: list[int] = []
        self.cleared = False
        for parameter in parameters:
            parameter.grad = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        taken = [parameter.grad for parameter in self.parameters]
        result = self.optimizer.step(*args, **kwargs)
        if args or kwargs:  # a closure, which computes them
            taken = [parameter.grad for parameter in self.parameters]
        self.versions = [gradient._version for gradient in taken if gradient is not None] if self.looks else []
        if self.recording is None:
            self.steps, self.taken = self.steps + 1, taken
        else:
            self.recording.steps, self.recording.gradients = self.recording.steps + 1, taken
        return result

    def replayed(self, recorded: Recorded) -> None:
        self.steps += recorded.steps
        self.taken = recorded.gradients or self.taken

    def show_gradients(self) -> None:
        """Put gradients back that the step cleared after the optimizer had taken them."""
        for parameter, gradient in zip(self.parameters, self.taken, strict=False):  # no step, no gradients
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def refuse_zeros(self) -> None:
        """Raises NoReference where all gradients were overwritten by zeros after the optimizer had taken them."""
        left = [gradient for gradient in self.taken if gradient is not None]
        if [gradient._version for gradient in left] != self.versions and not any(map(_has_value, left)):
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
            return
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:  # those that were taken stay what they are
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.optimizer, memo)


class Model:
    """A model whose call is what strategies made of it; attributes are the model's."""

    __class__ = property(lambda self: type(self.model))  # type: ignore[assignment]

    def __init__(self, program: Program, optimizer: Optimizer) -> None:
        self.model, self.call, self.zero_grad = program.model, program.call, optimizer.zero_grad

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.model, memo)
