"""Python state of a model: attributes of its modules, of objects they hold, and variables that its code names.

A position, a list, a cache that is no buffer, a flag that the first call sets: a step may change them as it does
buffers, so that they are put back before each check and compared after it. A captured graph repeats none of it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from optexp.python_state import likeness
from optexp.python_state.described import VOID, Building, Describing, Description, of_any_file
from optexp.python_state.hooks import Hooks, hooks
from optexp.python_state.records import Table, inside, ours, table
from optexp.python_state.variables import MISSING, Place, fixed, places, users

# The process's own generators are put back, and compared by what they do to results.
RANDOM = {"random": getattr(random, "_inst"), "numpy.random": getattr(numpy.random, "mtrand")._rand}  # noqa: B009

HOOKS = "(hooks)"  # in place of a name

_paths: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class Change:
    """The change of one attribute or variable in one step.

    begun:  it was no longer as it was at first when the step began
    state:  a step that leaves it unchanged leaves a later step another start: not so of a value made anew from each
            batch, as a map of attention kept for its readers, or made once, as a mask
    made:   there was nothing at first, and a step makes a new one: of its batch, or of what the step before made
    """

    before: Description
    after: Description
    begun: bool
    state: bool
    made: bool = False

    @property
    def pair(self) -> tuple[Description, Description]:
        """Before and after, by which two arms are compared: classes of two files have the same name alone."""
        return of_any_file(self.before), of_any_file(self.after)

    @property
    def numbers(self) -> bool:
        """Whether tensors are there, before and after."""
        return _has_tensors(self.before) and _has_tensors(self.after)


class ModelState:
    """Of one model; `first` is what it keeps when the program is built, before any step.

    loss:      whose code names variables too
    optimizer: whose hooks count
    unsteady:  names of what equal steps make other things of, as a time
    forgetful: names of what a step leaves whatever it finds, as scratch memory
    another:   the model has no module of the baseline's: its attributes are its own affair
    hooks:     that steps have registered, by place
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.places = list(_variables(model, loss))
        self.first = Table()
        self.unsteady: set[str] = set()
        self.forgetful: set[str] = set()
        self.another = False
        self.hooks: dict[str, list[tuple[int, Any]]] = {}
        self.begin()

    def begin(self) -> None:
        """Take the present state as the start of every check."""
        self.first = Table()
        self.first = self.read()

    def read(self) -> Table:
        """A copy of all of it."""
        found = table(self._modules(), self.places, self.first)
        found.hooks = self._hooks()
        return found

    def write(self, kept: Table) -> None:
        """Put it back, in place."""
        kept.restore()

    def changes(self, then: Table, now: Table) -> dict[str, Change]:
        """Values that differ from `then`."""
        names, found = self._names(), {}
        at_first, before, after = self.first.named(), then.named(), now.named()
        for name, in_place in then.changes(now).items():
            start, end = (
                Describing(kept, names)(values.get(name, MISSING)) for kept, values in ((then, before), (now, after))
            )
            if same(start, end):
                continue
            first = Describing(self.first, names)(at_first[name]) if name in at_first else VOID
            made = first in (None, VOID) and _has_tensors(end) and not in_place
            state = not (made or _grown(start, end) or name in RANDOM or name in self.forgetful)
            found[name] = Change(start, end, not same(first, start), state, made)
        return found

    def news(self, now: Table) -> dict[str, bytes]:
        """Values that differ from the first ones, to be put back in another process."""
        found = {name: pickle.dumps(change.after) for name, change in self.changes(self.first, now).items()}
        told = now.hooks.told(self.first.hooks)
        return {**found, HOOKS: pickle.dumps(told)} if told else found

    def moves(self, then: Table) -> dict[str, bytes]:
        """Values that differ from `then`, to be compared in another process."""
        found = self.changes(then, self.read())
        return {name: pickle.dumps(change) for name, change in found.items() if name not in {*self.unsteady, *RANDOM}}

    def adopt(self, news: Mapping[str, bytes]) -> None:
        """Take the values of another process that differ from the first ones."""
        for place, later in self._hooks().later(self.first.hooks).items():
            self.hooks.setdefault(place, [])[: len(later)] = later.items()
        self.first.restore()
        if not news:
            return
        self.first.hooks.put(pickle.loads(news[HOOKS]) if HOOKS in news else {}, self.hooks)
        values, owners = self.first.named(), dict[str, nn.Module | type | Place]()
        for record in self.first.records.values():
            if isinstance(record.owner, (nn.Module, Place)):
                owners[record.root] = record.owner
            elif hasattr(record.owner, "kind"):
                owners[record.root] = record.owner.kind
        some = next((t for t in self.model.parameters() if t.is_floating_point()), torch.empty(0))
        for name, packed in news.items():
            if name == HOOKS:
                continue
            build = Building(self._parts(), some.device, some.dtype)
            made = build(pickle.loads(packed), values.get(name, MISSING))
            whole, (path, _, last) = owners.get(name), name.rpartition(".")
            if isinstance(whole, Place):
                if whole.set is not None:
                    whole.set(made)
            elif (owner := owners.get(path)) is not None and not isinstance(owner, Place):
                _assign(owner, last, made)

    def strange(self) -> list[str]:
        """State of the model's own classes that can neither be read nor put back, with its type."""
        return [f"{name} ({kind})" for name, kind in sorted(self.read().strange.items())]

    @property
    def tensors(self) -> list[Tensor]:
        """Copies that are held here."""
        return [record.held for record in self.first.records.values() if isinstance(record.held, Tensor)]

    def held(self) -> list[Tensor]:
        """Tensors of attributes and variables that were there when the program was built."""
        known = self.first.named()
        return [r.owner for r in self.read().records.values() if isinstance(r.owner, Tensor) and r.root in known]

    def _hooks(self) -> Hooks:
        return hooks(self._modules(), self.optimizer)

    # --- names ----------------------------------------------------------------------------------------------------

    def _modules(self) -> dict[str, nn.Module]:
        """By path. A module keeps the one it had in the model that it was first seen in, whatever is put around it."""
        return {_paths.setdefault(module, path): module for path, module in self.model.named_modules()}

    def _parts(self) -> dict[str, Any]:
        """Modules, parameters and buffers."""
        modules, found = self._modules(), dict[str, Any]()
        for path, module in modules.items():
            found[path] = module
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[inside(path, name)] = tensor
        return found

    def _names(self) -> dict[int, str]:
        return {id(part): name for name, part in self._parts().items()}


def unpacked(packed: bytes) -> Change:
    change = pickle.loads(packed)
    assert isinstance(change, Change)
    return change


def same(ours: Description, theirs: Description) -> bool:
    """Whether two descriptions are equal, in every bit."""
    (one, shape), (other, as_well) = tree_flatten(ours), tree_flatten(theirs)
    return shape == as_well and all(map(_equal, one, other))


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return likeness.equal(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, numpy.ndarray):
        return numpy.array_equal(ours, theirs)
    return bool(ours == theirs) or (ours != ours and theirs != theirs)


def _has_tensors(told: Description) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(told))


def _grown(before: Description, after: Description) -> bool:
    """Whether a dict got entries and lost none: results that are kept for calls to come."""
    dicts = isinstance(before, tuple) and isinstance(after, tuple) and before[:1] == ("dict",) == after[:1]
    return dicts and len(before) < len(after) and all(map(same, before[1:], after[1:]))


def _variables(model: nn.Module, loss: Callable[..., Any] | None) -> Iterator[Place]:
    """Globals, and what functions around it hold, that the model's own code names, or its loss's.

    Hooks are left out: strategies count calls by them.
    """
    codes: dict[int, Any] = {}
    for module in model.modules():
        if users(type(module)) and not isinstance(module, torch.jit.ScriptModule):
            codes.setdefault(id(type(module)), module.forward)
        if callable(function := getattr(module, "function", None)) and ours(type(module)):
            codes[id(function)] = function
    if isinstance(loss, nn.Module):
        yield fixed("loss", loss)
    elif loss is not None:
        codes[id(loss)] = loss
    names, variables = set[str](), set[object]()
    for code in codes.values():
        for place in places(code):
            if (variable := _variable(place)) not in variables:
                variables.add(variable)
                numbered = (place.name, *(f"{place.name} ({number})" for number in range(2, len(names) + 3)))
                name = next(name for name in numbered if name not in names)
                names.add(name)
                yield replace(place, name=name)
    yield from (fixed(name, generator) for name, generator in RANDOM.items())


def _variable(place: Place) -> object:
    """The same for two places of one variable."""
    if isinstance(place.get, partial):
        return tuple(map(id, place.get.args[:1])), place.get.args[1:2]
    return id(place.get())


def _assign(owner: nn.Module | type, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    elif name in owner._buffers or name in owner._parameters:  # of a module that the model does not know
        return
    elif value is MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
