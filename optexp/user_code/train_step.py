"""A training step that the user wrote, as a step of a program: strategies and verification still reach in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from optexp.errors import NoReference, Unsupported
from optexp.program import Batch, NotCalled, Outputs, Program, flatten, others, taken_gradients
from optexp.python_state.variables import records_graphs, users
from optexp.user_code.recorded_steps import Recorded, watched

Gradients = Sequence[Tensor | None]
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
    """What a call finds in gradients; see `optexp.user_code.left_gradients`.

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
    miscounted: says what is wrong where a call makes so many optimizer steps, not 1; None: of a function
    """

    function: Callable[..., Any]
    unpack: Callable[[Batch], Any]
    model: Callable[[Program, Optimizer], Any] = lambda program, optimizer: Model(program, optimizer)
    handed: dict[str, Any] = field(default_factory=dict, compare=False)
    met: WeakSet[torch.nn.Module] = field(default_factory=WeakSet, compare=False)
    beginning: Beginning = field(default_factory=Beginning, compare=False)
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
                " (accumulate over parts of the batch inside it; a call that leaves its update out is not compared)"
            )
        how = ", in replays of CUDA graphs too," if self.replays else ""
        by_hand = "" if steps else "; a step that updates parameters by hand needs a file without get_optimizer()"
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
        self.function(model, self.unpack(batch), optimizer)
        held = {id(p) for group in program.optimizer.param_groups for p in group["params"]}
        taken = optimizer.taken or [parameter.grad for parameter in optimizer.parameters]
        own = [g for p, g in zip(optimizer.parameters, taken, strict=True) if id(p) in held]
        return Tried(optimizer.cleared, own, optimizer.left, any(map(_has_value, optimizer.written)))

    @staticmethod
    def _outputs(result: Any) -> Outputs:
        tensors = {name: tensor.detach() for name, tensor in flatten(result, "loss").items()}
        return tensors | others(result, "loss")


def _finite(model: torch.nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def _versioned(gradient: Tensor | None) -> tuple[Tensor, int] | None:
    return None if gradient is None else (gradient, gradient._version)


def _has_value(gradient: Tensor) -> bool:
    """Whether anything in it is not zero."""
    return bool((gradient._values() if gradient.layout is torch.sparse_coo else gradient).any())


class Optimizer:
    """The user's optimizer with gradients that stay after its step, for comparison; every step begins without any.

    parameters: all of the model's
    steps:      that were taken since, by calls or by replays of graphs
    taken:      gradients that the last of them took, one of each parameter
    looks:      whether somebody writes to them afterwards;  versions: of those, to know that
    copies:     the step may add to gradients after they were taken
    cleared:    zero_grad() was called before them
    zeroed:     parameters whose gradients zero_grad(set_to_none=False) leaves as zeros
    recording:  the graph that records steps instead of taking them
    others:     where other optimizers step, gradients that they take, with versions, by identity of the parameter
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
            own = {id(p): _versioned(p.grad) for group in other.param_groups for p in group["params"]}
            self.held.update(own)
            self.others |= {id(p): _versioned(p.grad) for p in self.parameters if id(p) not in self.held} | own

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
            if not any(_has_value(p.grad) for p in self.left if p.grad is not None):
                for parameter in self.parameters:
                    parameter.grad = None
            self.taken = [parameter.grad for parameter in self.parameters]

    @property
    def left(self) -> list[torch.nn.Parameter]:
        """Parameters that have gradients now."""
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    @property
    def written(self) -> list[Tensor]:
        """All gradients that the optimizer has taken, where somebody has written to one since; else none."""
        left = [gradient for gradient in self.taken if gradient is not None]
        return left if [gradient._version for gradient in left] != self.versions else []

    def show_gradients(self) -> None:
        """Put gradients back that the step cleared after the optimizer had taken them."""
        for parameter, gradient in zip(self.parameters, self.taken, strict=False):  # no step, no gradients
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def refuse_zeros(self) -> None:
        """Raises NoReference where all gradients were overwritten by zeros after the optimizer had taken them."""
        if self.written and not any(map(_has_value, self.written)):
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


def _is_users(value: Any, model: Any) -> bool:
    """Whether it is a method of this model that the user's class defines."""
    if not isinstance(value, MethodType) or value.__self__ is not model or not users(type(model)):
        return False
    return isinstance(value.__func__, FunctionType) and value.__func__.__module__ != nn.Module.__module__


@dataclass
class Stand:
    """What a `Model` stands for in one call of the user's function.

    own:       the user's model, which a strategy may have put inside another module
    model:     the program's;  call: what strategies made of its call
    zero_grad: of the optimizer
    called:    in this step
    keeps:     the last call's result is a result of the step;  returned: that result. Elsewhere it is not held: its
               autograd graph would outlive the step, and with it the stream of gradients, which a capture refuses
    """

    own: Any
    model: Any
    call: Callable[..., Any]
    zero_grad: Callable[..., Any]
    called: bool = False
    keeps: bool = False
    returned: Any = None

    def begin(self, program: Program, zero_grad: Callable[..., Any]) -> None:
        """Begin a call of the user's function."""
        self.model, self.call, self.zero_grad = program.model, program.call, zero_grad

    def owner(self, name: str) -> Any:
        """The module that has an attribute: the program's model, or the user's inside it."""
        inside = not hasattr(self.model, name) and any(module is self.own for module in self.model.modules())
        return self.own if inside else self.model


@dataclass(frozen=True)
class _Chained:
    """A method of torch's, as `train` and `to`. It returns the stand-in where it would return the model itself."""

    __wrapped__: Any
    stand_in: Model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        return self.stand_in if result is self.__wrapped__.__self__ else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


class Model:
    """A model whose call is what strategies made of it; attributes are the model's.

    Methods of the user's class run with this object as `self`: their calls of the model are the program's, too. It has
    one name of its own, `_optexp`: a user's model may have any other.
    """

    __class__ = property(lambda self: type(self._optexp.own))  # type: ignore[assignment]
    _optexp: Stand

    def __init__(self, program: Program, optimizer: Optimizer) -> None:
        stand = Stand(program.model, program.model, program.call, optimizer.zero_grad)
        object.__setattr__(self, "_optexp", stand)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand = self._optexp
        result = stand.call(*args, **kwargs)
        stand.called, stand.returned = True, result if stand.keeps else None
        return result

    @property
    def zero_grad(self) -> Callable[..., Any]:
        return self._optexp.zero_grad

    def __iter__(self) -> Iterator[Any]:  # of a Sequential, a ModuleList or a ModuleDict
        return iter(self._optexp.owner("__iter__"))

    def __getitem__(self, key: Any) -> Any:
        return self._optexp.owner("__getitem__")[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._optexp.owner("__contains__")

    def __len__(self) -> int:
        return len(self._optexp.owner("__len__"))

    def __bool__(self) -> bool:
        return bool(self._optexp.owner("__len__"))

    def __getattr__(self, name: str) -> Any:
        model = self._optexp.owner(name)
        value = getattr(model, name)
        if name == "forward" or not isinstance(value, MethodType) or value.__self__ is not model:
            return value
        return MethodType(value.__func__, self) if _is_users(value, model) else _Chained(value, self)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optexp.owner(name), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._optexp.owner(name), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._optexp.model, memo)
