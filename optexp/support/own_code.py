"""optexp's own functions in a process that runs code under test, which could replace them to judge itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

EXTENSIONS = ("optexp.strategies", "optexp.kernels", "optexp.workloads")  # packages that are under test themselves
FUNCTIONS = (FunctionType, type(cache(len)))  # cached ones, too
METHODS = (FunctionType, classmethod, staticmethod, property)

Known = Mapping[str, tuple[Any, CodeType | None]]


def functions() -> Known:
    """optexp's functions, classes and methods in the modules that are loaded, by name, with their code."""
    return {name: (value, getattr(value, "__code__", None)) for name, value in _found()}


def replaced(before: Known) -> list[str]:
    """Names of functions and classes that were replaced since `before`."""
    now = functions()
    return sorted(name for name, known in before.items() if now.get(name, (None, None)) != known)


def _found() -> Iterator[tuple[str, Any]]:
    """A class's methods once, by the name where it is written, however many modules import it.

    Dictionaries are copied whole: a list of their items lets the garbage collector run, and so code that imports.
    """
    classes: dict[type, None] = {}
    for module in [m for name, m in sys.modules.copy().items() if _is_own(name)]:
        for name, value in vars(module).copy().items():
            if isinstance(value, (*FUNCTIONS, type)) and _is_own(value.__module__):
                yield f"{module.__name__}.{name}", value
                if isinstance(value, type):
                    classes[value] = None
    for kind in classes:
        methods = [(key, held) for key, held in list(vars(kind).items()) if isinstance(held, METHODS)]
        yield from [(f"{kind.__module__}.{kind.__qualname__}.{key}", held) for key, held in methods]


@cache  # asked of every function there is
def _is_own(module: str) -> bool:
    return f"{module}.".startswith("optexp.") and not module.startswith(EXTENSIONS)
