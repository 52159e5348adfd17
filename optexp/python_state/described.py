"""One attribute of a record table, as plain data that another process compares and builds again.

A description is a number, a text, or a tuple whose first entry says what the others make.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from optexp.python_state.records import FIXED_OF_TORCH, Table, attributes_of, readable, walkable
from optexp.python_state.slots import SIMPLE
from optexp.python_state.variables import MISSING
from optexp.support.random_state import state_of

Description = Any
VOID = ("missing",)


@dataclass
class Describing:
    """One description: contents are those of a table, where it has any.

    names: of what belongs to the model, by identity: modules, parameters and buffers are told by name
    """

    table: Table
    names: Mapping[int, str]
    met: dict[int, int] = field(default_factory=dict)

    def __call__(self, value: Any) -> Description:
        if value is MISSING:
            return VOID
        if isinstance(value, SIMPLE):
            return value
        if isinstance(value, numpy.generic):
            return value.item()
        if id(value) in self.names:
            return ("part", self.names[id(value)])
        if isinstance(value, (*FIXED_OF_TORCH, type)):
            return ("constant", str(value))
        if isinstance(value, itertools.count):
            return ("count", *copy.copy(value).__reduce__()[1])  # type: ignore[misc]
        if isinstance(value, tuple):
            return ("tuple", *_class_of(value), *map(self, value))
        if isinstance(value, frozenset):
            return ("frozenset", *sorted(map(self, value), key=repr))
        if id(value) in self.met:
            return ("again", self.met[id(value)])
        self.met[id(value)] = len(self.met)
        return self._of_record(value)

    def _of_record(self, value: Any) -> Description:
        record = self.table.records.get(id(value))
        if record is None:
            return ("opaque", type(value).__name__)
        held = record.held
        if isinstance(value, Tensor):
            return ("tensor", held.cpu(), value.device.type == "cpu")
        if isinstance(value, numpy.ndarray):
            numbers = held.dtype != object and held.dtype.kind in "biufc"
            return ("array", torch.from_numpy(held) if numbers else repr(held))
        if isinstance(value, (list, deque)):
            return ("list" if isinstance(value, list) else "deque", *map(self, held))
        if isinstance(value, set):
            return ("set", *sorted(map(self, held), key=repr))
        if isinstance(value, dict):
            return ("dict", *((self(key), self(entry)) for key, entry in held.items()))
        if state_of(value) is not None:
            return ("generator", held)
        named = ((name, self(entry)) for name, entry in held.items())
        return ("object", *_class_of(value), *named)


@dataclass
class Building:
    """The object of a description, made of objects that exist already where they are of the same kind.

    parts: of the model, by name
    """

    parts: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype
    made: list[Any] = field(default_factory=list)

    def __call__(self, told: Description, live: Any = MISSING) -> Any:
        if not isinstance(told, tuple):
            return told
        kind, *rest = told
        if told == VOID:
            return MISSING
        if kind == "part":
            return self.parts.get(rest[0], live)
        if kind == "count":
            return itertools.count(*rest)
        if kind == "tuple":
            cls, entries = _found(*rest[:2]), [self(entry) for entry in rest[2:]]
            return cls._make(entries) if hasattr(cls, "_make") else tuple(entries)
        if kind == "frozenset":
            return frozenset(map(self, rest))
        if kind == "again":
            return self.made[rest[0]]
        if kind == "constant":
            return live
        place = len(self.made)
        self.made.append(live)
        return self._object(kind, rest, live, place)

    def _object(self, kind: str, rest: list[Any], live: Any, place: int) -> Any:
        if kind == "tensor":
            self.made[place] = self._tensor(live, *rest)
            return self.made[place]
        if kind == "array" and isinstance(rest[0], Tensor):
            self.made[place] = rest[0].numpy().copy()
            return self.made[place]
        if kind in _EMPTY:
            made = live if type(live) is type(_EMPTY[kind]) else copy.copy(_EMPTY[kind])
            self.made[place] = made
            old = list(made) if isinstance(made, (list, deque)) else dict(made) if isinstance(made, dict) else ()
            made.clear()
            if isinstance(made, dict):
                for key, entry in ((self(key), entry) for key, entry in rest):
                    made[key] = self(entry, dict(old).get(key, MISSING))
            elif isinstance(made, set):
                made.update(map(self, rest))
            else:
                made.extend(self(e, o) for e, o in itertools.zip_longest(rest, old[: len(rest)], fillvalue=MISSING))
            return made
        if kind == "generator" and (state := state_of(live)) is not None:
            state[1](rest[0])
        cls = _found(*rest[:2]) if kind == "object" else None
        if cls is None or not (walkable(cls) or issubclass(cls, nn.Module)):
            return live
        made = live if _class_of(live) == (*rest[:2],) else object.__new__(cls)  # an arm may have loaded its file anew
        self.made[place] = made
        now = attributes_of(made)
        for name, entry in rest[2:]:
            if (value := self(entry, now.get(name, MISSING))) is not MISSING:  # of a kind that cannot be described
                object.__setattr__(made, name, value)
        return made

    @torch.no_grad()
    def _tensor(self, live: Any, held: Tensor, on_cpu: bool) -> Tensor:
        if isinstance(live, Tensor) and live.shape == held.shape and readable(live):
            return live.copy_(held)
        wide = self.dtype if self.dtype is torch.float64 and held.is_floating_point() else held.dtype
        return held.to("cpu" if on_cpu else self.device, wide)


_EMPTY: dict[str, Any] = {"list": [], "dict": {}, "set": set(), "deque": deque()}


def of_any_file(told: Description) -> Description:
    """The same without the modules of classes."""
    if not isinstance(told, tuple):
        return told
    kind, *rest = told or ("",)
    if kind in ("object", "tuple") and len(rest) >= 2 and isinstance(rest[0], str):
        rest[0] = ""
    return (kind, *map(of_any_file, rest)) if told else told


def _class_of(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _found(module: str, name: str) -> Any:
    """A class by its name; None where this process has none of that name."""
    start = sys.modules.get(module)
    return reduce(lambda place, part: getattr(place, part, None), name.split("."), start)
