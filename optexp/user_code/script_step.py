"""A script's loop body as the step of a program: its variables that hold model and optimizer hold the program's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from optexp.errors import NoReference
from optexp.program import Batch, Outputs, Program, flatten
from optexp.python_state.variables import Place, attributes, places, users
from optexp.support.float64 import is_wide
from optexp.support.hooks import takes_hooks
from optexp.user_code.drawn_alike import seeded
from optexp.user_code.handed_model import Model
from optexp.user_code.handed_optimizer import Optimizer
from optexp.user_code.marked_loop import ITEMS
from optexp.user_code.misplaced_mark import misplaced
from optexp.user_code.own_program import INSIDE, UNCALLED
from optexp.user_code.script_run import Reached
from optexp.user_code.train_step import TrainStep

COUNT = "steps_that_drew"  # attribute of the body's function
DEPTH = 3  # of objects within objects that hold the model
ENTRIES = 64  # of a list, a dict or a tuple that may hold it
UNHELD = (
    "no variable that the marked body names holds the marked optimizer (attributes of modules are not looked at), so"
    " that its steps cannot be seen: assign it to one before the loop, and use that in the body and in"
    " optexp.steps(optimizer=...)"
)


@dataclass(frozen=True)
class Body:
    """The marked body as `function(model, items, optimizer)`.

    draws: it draws random numbers, which are seeded by the number of the step
    """

    reached: Reached
    draws: bool = False

    def __post_init__(self) -> None:
        setattr(self.reached.function, COUNT, 0)  # a variable of the step's, which is put back before it is repeated

    @cached_property
    def holders(self) -> tuple[list[Place], list[Place]]:
        """Variables that hold the model, and those that hold the optimizer."""
        mark = self.reached.mark
        every, optimizer = list(_variables(self.reached.function)), self.reached.optimizer
        if optimizer is not mark.optimizer:
            every += attributes("optimizer.", mark.optimizer)
        model = [place for place in every if place.get() is mark.model]
        return model, [place for place in every if optimizer is not None and place.get() is optimizer]

    def __call__(self, model: Any, items: list[Any], optimizer: Any) -> Any:
        model._optexp.keeps = self.reached.mark.optimizer is None
        with self._held(model, optimizer), self.reached.ambient.again(), self._drawing(model):
            found = self.reached.function(items)
        called = self.reached.mark.optimizer is not None
        if called and optimizer is not None and not optimizer.steps and not self.holders[1]:
            learns = any(parameter.grad is not None for parameter in optimizer.parameters)
            raise NoReference(UNHELD if learns else misplaced(self.reached, 0))
        return self._results(found, model)

    def _drawing(self, model: Any) -> AbstractContextManager[None]:
        if not self.draws:
            return nullcontext()
        count = getattr(self.reached.function, COUNT)
        setattr(self.reached.function, COUNT, count + 1)
        some = next(model.parameters(), torch.empty(0))
        return seeded(count, some.device, is_wide(some))

    @contextmanager
    def _held(self, model: Any, optimizer: Any) -> Iterator[None]:
        mark = self.reached.mark
        models, optimizers = self.holders
        for place in models:
            place.set(model)  # type: ignore[misc]
        for place in optimizers:
            place.set(optimizer)  # type: ignore[misc]
        try:
            yield
        finally:
            for place in models:
                place.set(mark.model)  # type: ignore[misc]
            for place in optimizers:
                place.set(self.reached.optimizer)  # type: ignore[misc]

    def _results(self, found: Any, model: Model) -> Any:
        """The loss; in inference what the body assigned, and what the model returned last."""
        variables = found if isinstance(found, Mapping) and ITEMS in found else {}
        loop, learns = self.reached.loop, self.reached.mark.optimizer is not None
        named = {name: variables[name] for name in (loop.losses if learns else loop.results) if name in variables}
        tensors = {name: value for name, value in named.items() if flatten(value)}
        returned, model._optexp.returned = model._optexp.returned, None
        if flatten(returned):  # names may hold anything else, such as a moved batch
            tensors["model"] = returned
        return next(iter(tensors.values())) if len(tensors) == 1 else tensors or None


@dataclass(frozen=True)
class Inference:
    """An inference loop's body as a step.

    met: programs whose model a step has called
    """

    body: Body
    unpack: Callable[[Batch], Any]
    met: WeakSet[nn.Module] = field(default_factory=WeakSet, compare=False)

    @property
    def calls(self) -> bool:
        return len(self.met) > 0

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        model = Model(program, Optimizer(None, ()))  # type: ignore[arg-type]
        # Where gradients of inputs are wanted, or updates are by hand, the step clears gradients itself.
        model._optexp.zero_grad = program.model.zero_grad
        found = self.body(model, self.unpack(batch), None)
        if model._optexp.called:
            self.met.add(program.model)
        elif program.model in self.met:
            raise NoReference(
                "the marked body called its model in earlier steps, and not in this one, as after `if i >= 300: break`:"
                " let the loop go on for any number of steps"
            )
        return {name: tensor.detach() for name, tensor in flatten(found).items()}


@dataclass(frozen=True)
class FirstCall:
    """The first call of the model in a step: detached arguments, and the dtype of autocast around it."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None


def first_call(program: Program, run: Callable[[], object]) -> FirstCall | None:
    """Run steps, and note how the first one calls the model; None where it does not."""
    seen: list[FirstCall] = []
    device = program.device.type

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not seen:
            given, named = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            lowered = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            seen.append(FirstCall(given, named, lowered))

    if not takes_hooks(program.model):
        run()
        return None
    handle = program.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return seen[0] if seen else None


def unreached(program: Program, first: FirstCall | None) -> list[str]:
    """A note where strategies do not reach the model's calls in a step.

    Args:
        first: As `first_call` returned it.
    """
    if first is None:
        return [UNCALLED] if takes_hooks(program.model) else []
    return [INSIDE] if isinstance(program.step, (TrainStep, Inference)) and not program.step.calls else []


def _variables(function: Callable[..., Any]) -> Iterator[Place]:
    """Variables that can be assigned: those that a body names, and attributes of the user's objects that it names."""
    met = set[int]()

    def within(place: Place, depth: int) -> Iterator[Place]:
        if place.set is not None:
            yield place
        value = place.get()
        if depth < DEPTH and id(value) not in met and users(type(value)) and not isinstance(value, (nn.Module, type)):
            met.add(id(value))
            for inner in attributes(f"{place.name}.", value):
                yield from within(inner, depth + 1)
        for entry in _entries(place) if depth < DEPTH else ():
            yield from within(entry, depth + 1)

    for place in places(function):
        yield from within(place, 0)


def _entries(place: Place) -> Iterator[Place]:
    """Entries of a list, a dict or a tuple, as variables; none of other values."""
    value = place.get()
    if type(value) is tuple and place.set is not None:
        for index, entry in enumerate(value[:ENTRIES]):
            yield Place(f"{place.name}[{index}]", partial(_get, entry), partial(_set_in_tuple, place, index))
    elif isinstance(value, (list, dict)) and len(value) <= ENTRIES:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            name = f"{place.name}[{key!r}]"
            yield Place(name, partial(value.__getitem__, key), partial(value.__setitem__, key))


def _get(value: Any) -> Any:
    return value


def _set_in_tuple(place: Place, index: int, value: Any) -> None:
    before = place.get()
    place.set((*before[:index], value, *before[index + 1 :]))  # type: ignore[misc]
