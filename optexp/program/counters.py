"""State of an optimizer beside its parameters' state: numbers and tensors in its groups (`group["k"] += 1`), in its
attributes, and in its state under names of its own; in lists and dicts there, too.

Learning rates are no part of it: who changes them is followed elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from optexp.python_state.counts import pace

PREFIX = "optimizer/counted/"  # of names in `Program.state`: optimizer/counted/group0/k, optimizer/counted/own/steps
DEPTH, ENTRIES = 3, 10_000  # of lists and dicts within each other, and of one
GONE = object()  # in the place of what was not there at first
_TORCHS = frozenset(["state", "param_groups", "defaults"])

Value = int | float | Tensor | None
Place = tuple[Any, Any]  # a list or a dict, and where the value lies in it


class _Met:
    """Values of an optimizer before its steps, and names of those that steps changed.

    numbers:    names of values that are no tensors
    containers: names of lists and dicts before its steps
    moved:      names of values that count
    computed:   keys of real numbers in its groups that its own step has changed
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.containers = dict(_containers(optimizer)).keys()
        self.met = _values(optimizer)  # no other tensor may get the identity of one
        self.first = {name: _copy(value) for name, value in self.met.items()}
        self.versions = {name: _version(value) for name, value in self.met.items()}
        self.moved, self.numbers = _of_parameters(optimizer, self.met), set[str]()
        self.computed = set[str]()

    def look(self, optimizer: Optimizer) -> dict[str, Value]:
        """Its present values."""
        now = _values(optimizer)
        self.numbers |= {name for name, value in now.items() if isinstance(value, (int, float))}
        self.moved |= {name for name, value in now.items() if _version(value) != self.versions.get(name)}
        self.moved |= self.first.keys() & dict(_containers(optimizer)).keys()  # None, in whose place a list lies now
        return now


def _of_parameters(optimizer: Optimizer, values: Mapping[str, Value]) -> set[str]:
    """Names of tensors in lists with one of each parameter, and of rows with all of them: another optimizer may keep
    such state by parameter, where it counts before any step changes it."""
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    row, lists, found = (sum(map(math.prod, shapes)),), dict[str, dict[str, torch.Size]](), set[str]()
    for name, value in values.items():
        if isinstance(value, Tensor):
            lists.setdefault(name.rpartition("/")[0], {})[name] = value.shape
            found |= {name} if len(shapes) > 1 and value.shape == row else set()
    return found.union(*(held for held in lists.values() if [*held.values()] == shapes))


_KNOWN: dict[int, tuple[ref[Optimizer], _Met]] = {}  # by id, as some have no hash


def meet(optimizer: Optimizer | None) -> None:
    """Take the present values of an optimizer for those before its steps: a strategy may have set them."""
    if optimizer is not None:
        key = id(optimizer)
        _KNOWN[key] = ref(optimizer, lambda _: _KNOWN.pop(key, None)), _Met(optimizer)


def _met(optimizer: Optimizer) -> _Met:
    known = _KNOWN.get(id(optimizer))
    if known is None or known[0]() is not optimizer:
        meet(optimizer)
    return _KNOWN[id(optimizer)][1]


def computed(optimizer: Optimizer) -> set[str]:
    """Keys of real numbers in its groups that its own step changes; who sees one add it here."""
    return _met(optimizer).computed


def counted(optimizer: Optimizer, followed: bool = False) -> dict[str, Value]:
    """Values that have changed since the optimizer was met, at the first call if not before; tensors as they are.

    followed: a user's step, whose `step_state` has the numbers of its groups
    """
    met = _met(optimizer)
    now = met.look(optimizer)
    names = (name for name in now.keys() & met.moved if now[name] is not None)
    return {name: now[name] for name in sorted(names) if not (followed and _is_followed(name, met))}


def still(optimizer: Optimizer) -> list[str]:
    """Names of values that steps have left alone."""
    met = _met(optimizer)
    now = met.look(optimizer)
    return sorted(name for name in now.keys() - met.moved if now[name] is not None)


@torch.no_grad()
def put(optimizer: Optimizer, values: Mapping[str, Tensor], followed: bool = False) -> None:
    """Write these values; others that steps changed or made go back to what they were at first, or away."""
    met = _met(optimizer)
    met.look(optimizer)
    places = dict(_places(optimizer))
    kept = {above for name in values for above in _above(name)}
    for name in sorted(
        (met.moved | values.keys()) - kept, key=lambda name: (len(name), name)
    ):  # of a list, 9 before 10
        place = places.get(name) or _absent(optimizer, name)
        if place is not None and not (followed and _is_followed(name, met)):
            saved = values.get(name, met.first.get(name, GONE))
            _put(place, saved, name in met.numbers)
    met.moved |= values.keys()
    filled = {above for name in met.moved for above in _above(name)} - met.containers
    for name, (owner, key) in list(_containers(optimizer)):
        if name in filled and not owner[key]:  # steps made it: they may ask whether it is there
            del owner[key]


def _put(place: Place, saved: Any, is_number: bool) -> None:
    owner, key = place
    there = _entry(owner, key)
    if saved is GONE and isinstance(owner, dict):
        owner.pop(key, None)
    elif saved is GONE:
        del owner[key:]  # what steps appended
    elif isinstance(there, Tensor) and isinstance(saved, Tensor) and there.shape == saved.shape:
        there.copy_(saved)  # others may hold it
    else:
        number = isinstance(saved, Tensor) and (is_number or (there is None and not saved.dim()))
        value = saved.item() if number else _copy(saved)
        owner.update({key: value}) if isinstance(owner, dict) else owner.__setitem__(slice(key, key + 1), [value])


def _above(name: str) -> Iterator[str]:
    """Names of the containers of a value."""
    parts = name.split("/")
    yield from ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def _containers(optimizer: Optimizer) -> Iterator[tuple[str, Place]]:
    for name, holder in _holders(optimizer).items():
        for key, value in holder.items():
            if isinstance(key, str) and isinstance(value, (list, dict)) and key not in ("params", *_TORCHS):
                yield f"{PREFIX}{name}/{key}", (holder, key)


def _is_followed(name: str, met: _Met) -> bool:
    return name.startswith(f"{PREFIX}group") and name in met.numbers


def _absent(optimizer: Optimizer, name: str) -> Place | None:
    """Where a value would lie that is not there now; None where nothing holds such values."""
    kind, *path, key = name.removeprefix(PREFIX).split("/")
    owner = _holders(optimizer).get(kind)
    for part in path:
        owner = None if owner is None else _entry(owner, int(part) if isinstance(owner, list) else part)
        owner = owner if isinstance(owner, (dict, list)) else None
    return None if owner is None else (owner, int(key) if isinstance(owner, list) else key)


def _entry(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(key)
    return owner[key] if key < len(owner) else None


def states(optimizer: Optimizer, prefix: str = "") -> Iterator[tuple[str, dict[Any, Any]]]:
    """The state of an optimizer, and of those that it is around and that keep one of their own, by a prefix."""
    yield prefix, optimizer.state
    for name, inner in list(vars(optimizer).items()):
        if isinstance(inner, Optimizer) and inner is not optimizer and inner.state is not optimizer.state:
            yield from states(inner, f"{prefix}{name}.")


def _holders(optimizer: Optimizer) -> dict[str, Any]:
    """Dicts that hold values: the groups, the optimizer's own attributes, and its state."""
    groups = {f"group{index}": group for index, group in enumerate(optimizer.param_groups)}
    return {**groups, "own": vars(optimizer), "state": optimizer.state}


def _places(optimizer: Optimizer) -> Iterator[tuple[str, Place]]:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, holder in _holders(optimizer).items():
        beside = {"lr", "params"} if name.startswith("group") else _TORCHS if name == "own" else ()
        for key in [key for key in holder if isinstance(key, str) and key not in beside]:
            yield from _inside(f"{PREFIX}{name}/{key}", (holder, key), own)


def _inside(name: str, place: Place, own: set[int], depth: int = 0) -> Iterator[tuple[str, Place]]:
    value = place[0][place[1]]
    tensor = type(value) is Tensor and id(value) not in own and not value.is_inference()
    if tensor or type(value) in (int, float, type(None)):
        yield name, place
    elif isinstance(value, (list, dict)) and depth < DEPTH and len(value) <= ENTRIES:
        for key in [k for k in value if isinstance(k, (str, int))] if isinstance(value, dict) else range(len(value)):
            yield from _inside(f"{name}/{key}", (value, key), own, depth + 1)


def _values(optimizer: Optimizer) -> dict[str, Value]:
    return {name: owner[key] for name, (owner, key) in _places(optimizer)}


def _version(value: Value) -> object:
    """A key that differs once a value has changed: of a tensor, its identity and the number of writes to it."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _copy(value: Value) -> Value:
    return value.detach().clone() if isinstance(value, Tensor) else value


def numbers(optimizer: Optimizer) -> dict[str, float]:
    """Single numbers that it keeps, of each parameter and beside them, by name."""
    return {name: float(owner[key]) for name, (owner, key) in _single(optimizer)}


@torch.no_grad()
def move_on(optimizer: Optimizer, seen: Sequence[Mapping[str, float]], steps: int) -> set[int]:
    """Move counts on by so many steps, and return how far a step moves them; `seen` after consecutive steps."""
    paces = set[int]()
    for name, (owner, key) in list(_single(optimizer)):
        if by := pace([each.get(name) for each in seen]):
            paces.add(by)
            if isinstance(owner[key], Tensor):
                owner[key].add_(by * steps)
            else:
                owner[key] += by * steps
    return paces


def _single(optimizer: Optimizer) -> Iterator[tuple[str, Place]]:
    places = list(_places(optimizer))
    for prefix, state in states(optimizer):
        for index, entries in enumerate(state.values()):
            keys = entries if isinstance(entries, dict) else ()
            places += [(f"{prefix}{index}/{key}", (entries, key)) for key in keys]
    for name, (owner, key) in places:
        value = owner[key]
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if one or type(value) in (int, float):
            yield name, (owner, key)


def is_counted(name: str) -> bool:
    """Whether an entry of `Program.state` is of such a value."""
    return name.startswith(PREFIX)
