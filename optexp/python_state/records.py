"""Contents of Python objects at one time, put back into the very same objects, and described for another process.

A table has one record for each object that can change: a shallow copy of its contents. Objects that share another one
still do when it is put back, and circles are no matter.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from optexp.python_state.hooks import Hooks
from optexp.python_state.slots import DATA, SIMPLE, SPACES, WITH_STATE
from optexp.python_state.variables import MISSING, Place, users
from optexp.support.random_state import same_states, state_of

INTERNAL = (frozenset(vars(nn.Module())) | {"_compiled_call_impl"}) - {"training"}
FIXED = (*SIMPLE, Enum, FunctionType, MethodType, BuiltinFunctionType, ModuleType, range, slice, numpy.generic)
FIXED_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
STRANGERS = frozenset({"torch", "triton", "numpy", "torchgen", "optexp"}) | sys.stdlib_module_names
OF_CLASSES = (*SIMPLE, Tensor, list, dict, set, deque, itertools.count)
MOST = 200_000  # entries of a list or a dict, and records of a model


@dataclass(frozen=True)
class Class:
    """Stands for a user's class, whose attributes may count."""

    kind: type


@dataclass
class Record:
    """One object: what it holds, and the name of the attribute or variable that leads to it (a module's: its path).

    told: False where another part of a program's state says what becomes of it
    """

    owner: Any
    held: Any
    root: str
    told: bool = True


@dataclass
class Table:
    """Records by identity of their objects.

    strange: by name of an attribute, the type of what it holds that can neither be read nor put back
    hooks:   of modules, parameters and the optimizer
    """

    records: dict[int, Record] = field(default_factory=dict)
    strange: dict[str, str] = field(default_factory=dict)
    hooks: Hooks = field(default_factory=Hooks)

    def restore(self) -> None:
        """Put everything back that is no longer so."""
        for record in self.records.values():
            try:
                _put(record.owner, record.held)
            except Exception as error:  # a class of a user's may refuse anything
                self.strange[record.root] = f"{type(record.owner).__name__}, {type(error).__name__}"
        self.hooks.restore()

    def named(self) -> dict[str, Any]:
        """Contents of every attribute and variable, by name."""
        found: dict[str, Any] = {}
        for record in self.records.values():
            if isinstance(record.owner, (nn.Module, Class)):
                found |= {inside(record.root, name): value for name, value in record.held.items()}
            elif isinstance(record.owner, Place):
                found[record.root] = record.held
            elif isinstance(record.owner, Tensor):  # of a module that the model does not know
                found.setdefault(record.root, record.owner)
        return found

    def changes(self, now: Table) -> dict[str, bool]:
        """Names of what is another thing now, and whether tensors or arrays were written there, in their old places."""
        found: dict[str, bool] = {}
        for key, record in now.records.items():
            if (old := self.records.get(key)) is None or old.held is record.held or not record.told:
                continue
            if isinstance(record.owner, (Tensor, numpy.ndarray)):
                if not _same_numbers(old.held, record.held):
                    found[record.root] = True
            elif isinstance(record.owner, (nn.Module, Class)):
                for name in _differing(old.held, record.held):
                    found.setdefault(inside(record.root, name), False)
            else:
                same = same_states if state_of(record.owner) is not None else _same_contents
                if not same(old.held, record.held):
                    found.setdefault(record.root, False)
        return found


def _own(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module itself, by torch's methods: those of a user's class may take no argument."""
    yield from nn.Module.parameters(module, recurse=False)
    yield from nn.Module.buffers(module, recurse=False)


def table(modules: Mapping[str, nn.Module], places: Iterable[Place], before: Table | None = None) -> Table:
    """Everything that can be reached from a model's modules, by path, and from the variables that its code names.

    before: whose copies of tensors serve again, where they are still true
    """
    found = Table()
    own = {id(t) for module in modules.values() for t in _own(module)}
    waiting: deque[tuple[Any, str, str]] = deque()  # the path to an object, and what it is told as
    for path, module in modules.items():
        held = _held(module, before)
        found.records[id(module)] = Record(module, held, path)
        waiting.extend(_led_to(module, held, path, path))
        for bound in (module._buffers, module._parameters):
            if isinstance(bound, dict):  # TorchScript's is another thing
                found.records[id(bound)] = Record(bound, dict(bound), path, told=False)
    kinds = {kind for module in modules.values() for kind in type(module).__mro__}
    waiting.extend((kind, kind.__name__, kind.__name__) for kind in sorted(kinds, key=lambda kind: kind.__qualname__))
    waiting.extend((place, place.name, place.name) for place in places)
    while waiting and len(found.records) < MOST:
        value, path, root = waiting.popleft()
        if id(value) in found.records or id(value) in own or isinstance(value, FIXED):
            continue
        if isinstance(value, tuple):
            waiting.extend((entry, f"{path}[{index}]", root) for index, entry in enumerate(value))
            continue
        owner = Class(value) if isinstance(value, type) else value
        held = _held(owner, before if isinstance(value, (Tensor, numpy.ndarray)) else None)
        if held is not None:
            told = path if isinstance(value, (nn.Module, type)) else root
            found.records[id(value)] = Record(owner, held, told)
            waiting.extend(_led_to(owner, held, path, told))
        elif _may_change(value):
            found.strange.setdefault(root, type(value).__name__)
    return found


# --- kinds of objects ----------------------------------------------------------------------------------------------


def _held(value: Any, before: Table | None = None) -> Any:
    """A shallow copy of its contents; None where they are not recorded."""
    if isinstance(value, nn.Module):
        if isinstance(value, torch.jit.ScriptModule):
            return {}
        return {name: _kept(entry) for name, entry in vars(value).items() if name not in INTERNAL}
    if isinstance(value, Place):
        return _kept(value.get())
    if isinstance(value, Class):
        if not users(value.kind) or ours(value.kind):
            return None
        held = {name: entry for name, entry in vars(value.kind).items() if not name.startswith("__")}
        return {name: _kept(entry) for name, entry in held.items() if isinstance(entry, OF_CLASSES)}
    if isinstance(value, (Tensor, numpy.ndarray)):
        old = before.records.get(id(value)) if before is not None else None
        return old.held if old is not None and _same_numbers(old.held, value) else _copied(value)
    if isinstance(value, (list, dict, set, deque)):
        return _shallow(value) if len(value) <= MOST else None
    if (state := state_of(value)) is not None:
        return state[0]()
    if not isinstance(value, (*DATA, *WITH_STATE)) and walkable(type(value)):
        return {name: _kept(entry) for name, entry in attributes_of(value).items()}
    return None


def _put(owner: Any, held: Any) -> None:
    if isinstance(owner, torch.jit.ScriptModule):  # of which nothing is read, either
        return
    if isinstance(owner, nn.Module):
        _refill(vars(owner), held, INTERNAL)
    elif isinstance(owner, Place):
        if owner.set is not None and not _same(owner.get(), held):
            owner.set(_kept(held))
    elif isinstance(owner, Class):
        now = _held(owner)
        for name in now.keys() - held.keys():
            delattr(owner.kind, name)
        for name in _differing(now, held):
            setattr(owner.kind, name, _kept(held[name]))
    elif isinstance(owner, (Tensor, numpy.ndarray)):
        if not _same_numbers(held, owner):
            _write(owner, held)
    elif isinstance(owner, (list, deque)):
        if not _same_contents(list(owner), held):
            owner.clear()
            owner.extend(map(_kept, held))
    elif isinstance(owner, set):
        if owner != held:
            owner.clear()
            owner.update(held)
    elif isinstance(owner, dict):
        _refill(owner, held)
    elif (state := state_of(owner)) is not None:
        state[1](held)
    else:
        now = attributes_of(owner)
        for name in now.keys() - held.keys():
            object.__delattr__(owner, name)
        for name in _differing(now, held):
            object.__setattr__(owner, name, _kept(held[name]))


def _led_to(value: Any, held: Any, path: str, root: str) -> Iterator[tuple[Any, str, str]]:
    if isinstance(value, (nn.Module, Class)):
        yield from ((entry, inside(path, name), inside(path, name)) for name, entry in held.items())
        if isinstance(value, nn.Module):  # one that no module of the model knows
            for bound in (value._buffers, value._parameters, value._modules):
                named = ((inside(path, name), entry) for name, entry in bound.items() if entry is not None)
                yield from ((entry, name, name) for name, entry in named)
    elif isinstance(value, Place):
        yield held, path, root
    elif isinstance(value, (list, deque)):
        yield from ((entry, f"{path}[{index}]", root) for index, entry in enumerate(held))
    elif isinstance(value, dict):
        yield from ((entry, f"{path}[{key!r}]", root) for key, entry in held.items())
    elif walkable(type(value)) and isinstance(held, dict):
        yield from ((entry, f"{path}.{name}", root) for name, entry in held.items())


def attributes_of(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def walkable(kind: type) -> bool:
    """Whether objects of a class are looked into: users' own, and those of packages that models are made of."""
    return issubclass(kind, SPACES) or not (ours(kind) or kind.__module__.partition(".")[0] in STRANGERS)


def ours(kind: type) -> bool:
    """Whether a class is this project's own, but for the models of its workloads."""
    return kind.__module__.startswith("optexp.") and not kind.__module__.startswith("optexp.workloads.")


def _may_change(value: Any) -> bool:
    """Whether something that cannot be read may be another thing the next time: what gives one value after the other,
    and what holds some. Torch's own objects, and what is called, are no state."""
    if isinstance(value, (type, frozenset, itertools.count, *FIXED_OF_TORCH)):
        return False
    return hasattr(value, "__next__") or (hasattr(value, "__len__") and not callable(value))


# --- contents ------------------------------------------------------------------------------------------------------


def _kept(value: Any) -> Any:
    """A count cannot be written to: another one takes its place."""
    return copy.copy(value) if type(value) is itertools.count else value


def _shallow(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _kept(entry) for key, entry in value.items()}
    return set(value) if isinstance(value, set) else [_kept(entry) for entry in value]


def _copied(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return value.copy()
    with torch.inference_mode(False), torch.no_grad():
        return value.detach().clone() if readable(value) else None


def readable(tensor: Tensor) -> bool:
    """Whether its elements can be read one by one."""
    return tensor.layout is torch.strided and not tensor.is_meta


@torch.no_grad()
def _write(owner: Any, held: Any) -> None:
    if isinstance(owner, numpy.ndarray):
        owner[...] = held
    elif held is not None and not any(s == 0 and n > 1 for n, s in zip(owner.shape, owner.stride(), strict=True)):
        with torch.inference_mode(owner.is_inference()):
            owner.detach().copy_(held)


def _refill(owner: dict[Any, Any], held: Mapping[Any, Any], spared: Iterable[str] = ()) -> None:
    for name in [name for name in owner if name not in held and name not in spared]:
        del owner[name]
    for name, value in held.items():
        if not _same(owner.get(name, MISSING), value):
            owner[name] = _kept(value)


def inside(root: str, name: str) -> str:
    """The name of an attribute, of a module with a path."""
    return f"{root}.{name}" if root else name


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two entries are: the same object, or equal values of what never changes."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, SIMPLE):
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    if isinstance(ours, itertools.count):
        return repr(ours) == repr(theirs)
    return isinstance(ours, (*FIXED_OF_TORCH, frozenset, numpy.generic)) and bool(ours == theirs)


def _same_contents(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return not _differing(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, set):
        return bool(ours == theirs)
    return _same(ours, theirs) or repr(ours) == repr(theirs)


def _differing(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> list[Any]:
    keys = dict.fromkeys((*theirs, *ours))
    return [key for key in keys if not _same(ours.get(key, MISSING), theirs.get(key, MISSING))]


def _same_numbers(held: Any, value: Any) -> bool:
    """Of a copy and what it was copied from, NaN included."""
    if isinstance(value, numpy.ndarray):
        return bool(held.shape == value.shape and held.tobytes() == value.tobytes())
    if held.shape != value.shape or held.dtype != value.dtype:
        return False
    with torch.no_grad():
        equal = (held == value) | ((held != held) & (value != value))
        return bool(equal.all())
