"""Variables that the code of a training step names: where what it remembers from call to call can be.

Globals, what a function around it holds, attributes of an object whose method it is; likewise of functions of the
user's that it calls, and of what is wrapped in decorators and partials.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

INSTALLED = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(folder for folder in sys.path if any(Path(folder).glob("*.dist-info"))),
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1] / "kernelkit"),  # its caches hold facts about this card, no state of a program
    "<frozen",
)
OURS = str(Path(__file__).parents[1])
WORKLOADS = str(Path(OURS) / "workloads")  # their steps stand where a user's would
FUNCTIONS = (FunctionType, MethodType, partial)


class Missing(Enum):
    """Stands for a value that is not there yet."""

    MISSING = "missing"


MISSING = Missing.MISSING


@dataclass(frozen=True)
class Place:
    """A variable: what it is called, how it is read, and how it is assigned (None: it cannot be)."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None = None


def places(step: Callable[..., Any]) -> Iterator[Place]:
    """Variables that hold no function and no recorder of graphs. One that is not there yet is `MISSING`."""
    for code in functions(step):
        yield from (_in_context(place) for place in _of(code) if not _runs(place.get()))


def _in_context(place: Place) -> Place:
    """The place itself; of a ContextVar that has a value, what it holds here, by the variable's name."""
    variable = place.get()
    if not isinstance(variable, ContextVar) or _value(variable) is MISSING:
        return place
    return Place(place.name, partial(_value, variable), variable.set)


def _value(variable: ContextVar[Any]) -> Any:
    """With the variable's own default; `MISSING` where it has none, and nothing was set: no later call can unset it."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def functions(step: Callable[..., Any]) -> Iterator[Any]:
    """The step's code: itself, and what its variables hold of functions and recorders of graphs."""
    waiting: list[Any] = [step]
    seen: set[int] = set()
    while waiting:
        code = waiting.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        yield code
        waiting += [value for place in _of(code) if _runs(value := place.get())]


def _runs(value: Any) -> bool:
    return isinstance(value, FUNCTIONS) or records_graphs(type(value))


def attributes(prefix: str, owner: Any) -> Iterator[Place]:
    """Those of an object, as places, with those that its own code may make later."""
    held = getattr(owner, "__dict__", {})
    later = sorted(_made_by(owner) - held.keys()) if hasattr(owner, "__dict__") else []
    yield from (_variable(prefix + name, held, name) for name in [*held, *later])


def fixed(name: str, value: Any) -> Place:
    """A place that cannot be assigned, whose value can only be changed."""
    return Place(name, lambda: value)


def users(kind: type) -> bool:
    """Whether a class is a user's: neither Python's nor an installed package's."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return not file.startswith(INSTALLED) if file else kind.__module__ not in sys.builtin_module_names


def is_users_file(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor of this framework."""
    if file.startswith(("<", *INSTALLED)):
        return False
    return not file.startswith(OURS) or file.startswith(WORKLOADS)


def records_graphs(kind: type) -> bool:
    """Whether a user's class names torch's CUDAGraph: its objects hold memory of graphs, which may not be put back."""
    methods = (value for value in vars(kind).values() if isinstance(value, FunctionType))
    return users(kind) and any("CUDAGraph" in _named(method.__code__) for method in methods)


def _of(code: Any) -> Iterator[Place]:
    if isinstance(code, partial):
        yield fixed("function", code.func)
        yield from (fixed(f"argument {index}", value) for index, value in enumerate(code.args))
        yield from (fixed(name, value) for name, value in code.keywords.items())
    elif isinstance(code, MethodType):
        yield fixed("function", code.__func__)
        yield fixed("self", code.__self__)
        for base in type(code.__self__).__mro__:
            if users(base):
                yield from (fixed(name, value) for name, value in vars(base).items() if isinstance(value, FunctionType))
    elif isinstance(code, FunctionType):
        if inspect.unwrap(code) is not code:
            yield fixed("function", inspect.unwrap(code))
        for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
            yield Place(name, partial(contents, cell), partial(_fill, cell))
        yield from (fixed(f"default {index}", value) for index, value in enumerate(code.__defaults__ or ()))
        yield from (fixed(name, value) for name, value in (code.__kwdefaults__ or {}).items())
        yield from attributes(f"{code.__name__}.", code)
        if not code.__code__.co_filename.startswith(INSTALLED):
            scope, assigned = code.__globals__, _assigned(code.__code__)
            named = _named(code.__code__) - vars(builtins).keys()
            yield from (_variable(name, scope, name) for name in sorted(named) if name in scope or name in assigned)
            for module in [scope[name] for name in sorted(named) if _is_users_module(scope.get(name))]:
                inside = sorted(named & vars(module).keys())
                yield from (_variable(f"{module.__name__}.{name}", vars(module), name) for name in inside)
    elif callable(code) and users(type(code)):
        yield fixed("call", MethodType(type(code).__call__, code))
        held = vars(code) if hasattr(code, "__dict__") else {}
        yield from (fixed(name, value) for name, value in held.items() if isinstance(value, FUNCTIONS))


def _is_users_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and not (getattr(value, "__file__", None) or INSTALLED[0]).startswith(
        INSTALLED
    )


def contents(cell: CellType) -> Any:
    """The value of an enclosing function's variable; `MISSING` where no line has assigned it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _fill(cell: CellType, value: Any) -> None:
    if value is not MISSING:
        cell.cell_contents = value
    elif contents(cell) is not MISSING:
        del cell.cell_contents


def _variable(name: str, scope: dict[str, Any], key: str) -> Place:
    return Place(name, partial(_read, scope, key), partial(_write, scope, key))


def _read(scope: Mapping[str, Any], key: str) -> Any:
    return scope.get(key, MISSING)


def _write(scope: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        scope.pop(key, None)
    else:
        scope[key] = value


def _named(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_named, _inner(code)))


@cache
def _assigned(code: CodeType) -> frozenset[str]:
    """The globals among them that may be made by the code."""
    stored = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL")
    return stored.union(*map(_assigned, _inner(code)))


def _made_by(owner: Any) -> set[str]:
    """Attributes that a user's function assigns to itself, or methods of an object of the user's to that."""
    functions: list[FunctionType] = []
    if isinstance(owner, FunctionType):
        functions = [owner]
    elif not isinstance(owner, torch.nn.Module):  # whose attributes lie elsewhere
        kinds = [kind for kind in type(owner).__mro__ if users(kind)]
        functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    found = set[str]()
    for function in functions:
        code = function.__code__
        itself = function.__name__ if function is owner else next(iter(code.co_varnames), "")
        found |= frozenset() if code.co_filename.startswith(INSTALLED) else _set(code, itself)
    return found


@cache
def _set(code: CodeType, variable: str) -> frozenset[str]:
    """Names of attributes that the code assigns to what a variable holds."""
    steps = list(dis.get_instructions(code))
    pairs = [(load, store) for load, store in pairwise(steps) if store.opname == "STORE_ATTR"]
    return frozenset(
        str(store.argval) for load, store in pairs if load.opname.startswith("LOAD") and load.argval == variable
    )


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]
