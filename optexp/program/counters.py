"""Numbers that an optimizer counts outside of its state: in its groups (`group["k"] += 1`), or in attributes.

Learning rates are no counters: who changes them is followed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any
from weakref import ref

from torch.optim import Optimizer

PREFIX = "optimizer/counted/"  # of names in `Program.state`: optimizer/counted/group0/k, optimizer/counted/own/steps

Number = int | float


class _Met:
    """Numbers of an optimizer before its steps, and those that steps changed, by name."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.first, self.moved = _numbers(optimizer), set[str]()


_KNOWN: dict[int, tuple[ref[Optimizer], _Met]] = {}  # by id, as some have no hash


def meet(optimizer: Optimizer | None) -> None:
    """Take the present numbers of an optimizer for those before its steps: a strategy may have set them."""
    if optimizer is not None:
        key = id(optimizer)
        _KNOWN[key] = ref(optimizer, lambda _: _KNOWN.pop(key, None)), _Met(optimizer)


def _met(optimizer: Optimizer) -> _Met:
    known = _KNOWN.get(id(optimizer))
    if known is None or known[0]() is not optimizer:
        meet(optimizer)
    return _KNOWN[id(optimizer)][1]


def counted(optimizer: Optimizer) -> dict[str, Number]:
    """Numbers that have changed since the optimizer was met, at the first call if not before."""
    met, now = _met(optimizer), _numbers(optimizer)
    met.moved |= {name for name, value in now.items() if value != met.first.get(name)}
    return {name: value for name, value in now.items() if name in met.moved}


def put(optimizer: Optimizer, values: Mapping[str, Number]) -> None:
    """Write these numbers; others that steps changed or made go back to what they were at first, or away."""
    counted(optimizer)
    met, holders = _met(optimizer), _holders(optimizer)
    met.moved |= values.keys()
    for name in met.moved:
        holder, _, key = name.removeprefix(PREFIX).partition("/")
        value = values.get(name, met.first.get(name))
        if holder not in holders:  # of an optimizer with more groups
            continue
        if value is None:
            holders[holder].pop(key, None)
        else:
            holders[holder][key] = value


def _holders(optimizer: Optimizer) -> dict[str, MutableMapping[str, Any]]:
    """Dicts that hold numbers: the groups, and the optimizer's own attributes."""
    return {f"group{index}": group for index, group in enumerate(optimizer.param_groups)} | {"own": vars(optimizer)}


def _numbers(optimizer: Optimizer) -> dict[str, Number]:
    return {
        f"{PREFIX}{name}/{key}": value
        for name, holder in _holders(optimizer).items()
        for key, value in holder.items()
        if type(value) in (int, float) and key != "lr" and not key.startswith("_")
    }


def is_counted(name: str) -> bool:
    """Whether an entry of `Program.state` is of such a number."""
    return name.startswith(PREFIX)
