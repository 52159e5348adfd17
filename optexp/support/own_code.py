"""optexp's own functions in a process that runs code under test, which could replace them to judge itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

EXTENSIONS = ("optexp.strategies", "optexp.kernels", "optexp.workloads")  # packages that are under test themselves
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
    for module in [m for name, m in list(sys.modules.items()) if _is_own(name)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and _is_own(value.__module__):
                yield f"{module.__name__}.{name}", value
            elif isinstance(value, type) and _is_own(value.__module__):
                methods = ((key, held) for key, held in list(vars(value).items()) if isinstance(held, METHODS))
                yield f"{module.__name__}.{name}", value
                yield from ((f"{module.__name__}.{name}.{key}", held) for key, held in methods)


def _is_own(module: str) -> bool:
    return f"{module}.".startswith("optexp.") and not module.startswith(EXTENSIONS)
