"""A training step that the user wrote, as a step of a program: strategies and verification still reach in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from optexp.errors import LEFT_OUT, NoReference, Unsupported
from optexp.program import Batch, NotCalled, Outputs, Program, flatten, others
from optexp.python_state.variables import records_graphs
from optexp.user_code.handed_model import Model
from optexp.user_code.handed_optimizer import Gradients, Optimizer, has_value
from optexp.user_code.recorded_steps import watched

SOMETIMES = (
    "this step adds to gradients of the step before, and the first step cleared what it found: let each step clear them"
    " (optimizer.zero_grad()); a step of several batches loops over them itself, or has every=4 at its mark"
)
OTHERS = (
    "steps of the baseline add to gradients that earlier steps left, and the model here has other parameters: let each"
    " step clear its gradients (optimizer.zero_grad())"
)


@dataclass
class Beginning:
    """Gradients at the start of a call; see `optexp.user_code.left_gradients`.

    adds:   a call reads what the one before left there; `kept` holds it, by name of the parameter
    unread: trial calls have read none of it
    called: each clears them by zero_grad()
    zeros:  names of parameters whose gradients are zeros, and not None, as a call begins
    left:   names of those that get gradients
    later:  a call may add to gradients after its optimizer step has taken them
    """

    adds: bool = False
    unread: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)
    called: bool = False
    zeros: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    later: bool = False


@dataclass(frozen=True)
class Tried:
    """A call that counts as none.

    cleared: it called zero_grad() before its optimizer step;  taken: gradients of that step, or of a step left out
    left:    parameters with gradients that are there for the next call
    later:   it added to gradients after that step
    """

    cleared: bool
    taken: Gradients
    left: Sequence[torch.nn.Parameter]
    later: bool


@dataclass(frozen=True)
class TrainStep:
    """A step by the user's `function(model, batch, optimizer)`, which returns the loss, other values, or nothing.

    unpack: a batch as the user's own loader gives it
    model:  the model as the function sees it
    handed: model and optimizer as the function sees them, the same objects in every call: it may keep them
    met:    programs whose first step has shown that it leaves values in gradients, or drops them whole
    beginning: what a call finds in gradients
    optional: the optimizer is a default one, which the user's files do not name
    miscounted: says what is wrong where a call makes so many optimizer steps, not 1; None: of a function
    """

    function: Callable[..., Any]
    unpack: Callable[[Batch], Any]
    model: Callable[[Program, Optimizer], Any] = lambda program, optimizer: Model(program, optimizer)
    handed: dict[str, Any] = field(default_factory=dict, compare=False)
    met: WeakSet[torch.nn.Module] = field(default_factory=WeakSet, compare=False)
    beginning: Beginning = field(default_factory=Beginning, compare=False)
    optional: bool = field(default=False, compare=False)
    miscounted: Callable[[int], str] | None = field(default=None, compare=False)

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
        model, optimizer = self.hand(program, looks=is_first)
        self._begin(program, optimizer)
        alone = isinstance(program.optimizer, NotCalled)
        with watched(optimizer) if self.replays else optimizer.others_noted() if alone else nullcontext():
            result = self.function(model, self.unpack(batch), optimizer)
        if alone:
            optimizer.take_others()
        if self.beginning.adds:
            self._keep(program)
        elif self.beginning.called and not (optimizer.cleared or self.replays) and optimizer.left:
            raise NoReference(SOMETIMES)
        if is_first:
            optimizer.refuse_zeros()
            if not (self.beginning.adds or self.beginning.unread):
                optimizer.refuse_leftovers()
            self.met.add(program.model)
        optimizer.show_gradients()
        if not optimizer.steps and not _finite(program.model):
            raise NoReference(
                "train_step left its optimizer step out because gradients overflow, as a GradScaler does: let it start"
                " with a smaller scale (init_scale=)"
            )
        if optimizer.steps != 1:
            raise NoReference(
                self.miscounted(optimizer.steps) if self.miscounted else self._not_one(optimizer.steps, alone)
            )
        return self._outputs(result)

    def hand(self, program: Program, looks: bool = False) -> tuple[Any, Optimizer]:
        """Model and optimizer for one call of the function.

        Args:
            looks: As `Optimizer` takes it.
        """
        assert program.optimizer is not None
        parameters = [*program.model.parameters()]
        if not self.handed:
            optimizer = Optimizer(program.optimizer, parameters)
            self.handed.update(model=self.model(program, optimizer), optimizer=optimizer)
        if program.step_state is not None:
            program.step_state.handed = self.handed
        model, optimizer = self.handed["model"], self.handed["optimizer"]
        optimizer.begin(program.optimizer, parameters, looks)
        model._optexp.begin(program, optimizer.zero_grad)
        return model, optimizer

    @property
    def calls(self) -> bool:
        """Whether a call of the function has called the model that it was handed."""
        return bool(self.handed) and self.handed["model"]._optexp.called

    def _not_one(self, steps: int, alone: bool) -> str:
        if alone:
            return (
                "train_step called step() of none of its optimizers: a call must be one whole optimizer step"
                f" (accumulate over parts of the batch inside it; {LEFT_OUT})"
            )
        if self.optional and not steps:
            return (
                "a call of train_step steps no optimizer and changes no parameter of the model: copies of them that it"
                f" trains, as in a dict, are not compared (write them back to the model in each call), and {LEFT_OUT}"
            )
        how = ", in replays of CUDA graphs too," if self.replays else ""
        by_hand = (
            f"; {LEFT_OUT}: let a condition on it, as one on a norm or a count of calls, hold in each call that is"
            " compared; a step that updates parameters by hand needs a file without get_optimizer()"
        )
        by_hand = "" if steps else by_hand
        return (
            f"train_step called optimizer.step(){how} {steps} times: a call must be one whole optimizer step"
            f" (accumulate over parts of the batch inside it{by_hand})"
        )

    def _begin(self, program: Program, optimizer: Optimizer) -> None:
        """Let parameters have the gradients that a call finds."""
        found, optimizer.copies = self.beginning, self.beginning.adds or self.beginning.later
        parameters = dict(program.model.named_parameters())
        if any(name not in parameters or parameters[name].shape != kept.shape for name, kept in found.kept.items()):
            raise NoReference(OTHERS)
        for name, parameter in parameters.items():
            if name in found.kept:
                parameter.grad = found.kept[name].clone()
            elif name in found.zeros:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.zeroed += [parameter] * (name in found.left)

    @torch.no_grad()
    def _keep(self, program: Program) -> None:
        """Keep gradients for the next call, in memory that a captured graph may write to."""
        for name, parameter in program.model.named_parameters():
            if (kept := self.beginning.kept.get(name)) is not None:
                kept.zero_() if parameter.grad is None else kept.copy_(parameter.grad.to_dense())

    def tried(self, program: Program, batch: Batch, begins: Mapping[torch.nn.Parameter, Tensor]) -> Tried:
        """A call on a batch, whose effects the caller undoes.

        begins: gradients that it finds; of other parameters none
        """
        assert program.optimizer is not None
        model, optimizer = self.hand(program, looks=True)
        for parameter, gradient in begins.items():
            parameter.grad = gradient
        alone = isinstance(program.optimizer, NotCalled)
        with optimizer.others_noted() if alone else nullcontext():
            self.function(model, self.unpack(batch), optimizer)
        if alone:
            optimizer.take_others()
        held = {id(p) for group in program.optimizer.param_groups for p in group["params"]}
        taken = optimizer.taken or [parameter.grad for parameter in optimizer.parameters]
        own = [g for p, g in zip(optimizer.parameters, taken, strict=True) if id(p) in held]
        return Tried(optimizer.cleared, own, optimizer.left, any(map(has_value, optimizer.written)))

    @staticmethod
    def _outputs(result: Any) -> Outputs:
        tensors = {name: tensor.detach() for name, tensor in flatten(result, "loss").items()}
        return tensors | others(result, "loss")


def _finite(model: torch.nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
