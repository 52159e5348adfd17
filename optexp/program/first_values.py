"""Values that an optimizer's state begins with, noted as the optimizer's own code first writes them: ones whose powers
run on, a copy of the parameter, a small multiple of the identity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

Value = int | float | Tensor
Firsts = dict[tuple[int, str], Value]  # by the id of the parameter, and by name

_KNOWN: dict[int, tuple[ref[Optimizer], Firsts]] = {}  # by id, as some have no hash


def is_own(optimizer: Optimizer) -> bool:
    """Whether the optimizer's code is not torch's, whose first values are known."""
    return not type(optimizer).__module__.startswith("torch.") and "state" in vars(optimizer)


@contextmanager
def noted(optimizer: Optimizer, tried: bool = False) -> Iterator[None]:
    """Note first values of what the first step of a user's optimizer makes within the block.

    A momentum may begin as the first gradient, which is no first value: of two steps on other gradients, values that
    are the same count.

    tried: the step is the first of these two, and its state is forgotten
    """
    if not is_own(optimizer):
        yield
        return
    held, key = optimizer.state, id(optimizer)
    noting = _Noting(held)
    sharing = [optimizer, *(o for o in vars(optimizer).values() if isinstance(o, Optimizer) and o.state is held)]
    for each in sharing:
        each.state = noting
    try:
        yield
        earlier = noting.firsts if tried else _KNOWN[key][1] if key in _KNOWN else {}
        firsts = {name: value for name, value in noting.firsts.items() if _same(value, earlier.get(name))}
        _KNOWN[key] = ref(optimizer, lambda _: _KNOWN.pop(key, None)), firsts
    finally:
        if not tried:
            held.update({key: dict(each) if isinstance(each, _Entries) else each for key, each in noting.items()})
        for each in sharing:
            each.state = held


def first(optimizer: Optimizer, parameter: Tensor, name: str) -> Value | None:
    """The first value of the parameter's state of this name; None where it was not seen."""
    known = _KNOWN.get(id(optimizer))
    return known[1].get((id(parameter), name)) if known is not None and known[0]() is optimizer else None


def pass_on(optimizer: Optimizer, new_of: Mapping[Tensor, tuple[Tensor, bool]]) -> None:
    """First values of parameters become those of others in their place, some of them transposed."""
    firsts = _KNOWN[id(optimizer)][1] if id(optimizer) in _KNOWN else {}
    for old, (new, turned) in new_of.items():
        for owner, name in [key for key in firsts if key[0] == id(old)]:
            value = firsts.pop((owner, name))
            firsts[id(new), name] = value.t().contiguous() if turned and isinstance(value, Tensor) else value


class _Noting(defaultdict[Any, Any]):
    """An optimizer's state, which notes what the entries of each parameter begin with."""

    def __init__(self, held: Mapping[Any, Any]) -> None:
        super().__init__(dict, held)
        self.firsts: Firsts = {}

    def __missing__(self, parameter: Any) -> Any:
        super().__setitem__(parameter, made := _Entries(self.firsts, parameter))
        return made

    def __setitem__(self, parameter: Any, entries: Any) -> None:
        for name, value in entries.items() if isinstance(entries, dict) else ():
            _note(self.firsts, parameter, name, value)
        super().__setitem__(parameter, entries)

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default
        return self[parameter]


class _Entries(dict[str, Any]):
    def __init__(self, firsts: Firsts, parameter: Any) -> None:
        super().__init__()
        self.firsts, self.parameter = firsts, parameter

    def __setitem__(self, name: str, value: Any) -> None:
        self._note(name, value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._note(name, default)
        return super().setdefault(name, default)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        self._note(name, default)  # a count may begin as this, and is written once it is 1
        return super().get(name, default)

    def update(self, *others: Any, **named: Any) -> None:
        for name, value in dict(*others, **named).items():
            self[name] = value

    def _note(self, name: str, value: Any) -> None:
        if name not in self:
            _note(self.firsts, self.parameter, name, value)


def _note(firsts: Firsts, parameter: Any, name: Any, value: Any) -> None:
    key = (id(parameter), name)
    if key not in firsts and isinstance(value, (int, float, Tensor)):
        firsts[key] = value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: Value, other: Value | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
