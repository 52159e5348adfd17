"""Calls that a process makes once, and code that runs in several processes and several times makes more often.

optexp runs a user's code in each arm, and twice in the reference, whose two programs share no variable.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

WORLD = "WORLD_SIZE"  # variable of the environment that torchrun sets


@contextmanager
def several_times() -> Iterator[None]:
    """A context in which such calls may come again, and find no port taken."""
    if hydra := sys.modules.get("hydra.core.global_hydra"):
        hydra.GlobalHydra.instance().clear()  # the command line's own, or that of the run before
    with ExitStack() as replaced:
        for module in (multiprocessing, torch.multiprocessing):
            replaced.enter_context(_replaced(module, "set_start_method", _forced))
        replaced.enter_context(_replaced(torch, "set_num_interop_threads", _tried))
        replaced.enter_context(_replaced(torch.library, "Library", _defined_again))
        if torch.distributed.is_available():
            replaced.enter_context(_replaced(torch.distributed, "init_process_group", _alone))
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, wrapped: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, wrapped(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _forced(original: Callable[..., None]) -> Callable[..., None]:
    """The method by which processes start, set however often."""

    def set_start_method(method: str | None, force: bool = False) -> None:
        original(method, force=True)

    return set_start_method


def _tried(original: Callable[[int], None]) -> Callable[[int], None]:
    """The number of threads that wait for other operators: no result depends on it, and no operator here waits."""

    def set_num_interop_threads(number: int) -> None:
        with suppress(RuntimeError):
            original(number)

    return set_num_interop_threads


_libraries: list[torch.library.Library] = []  # they stay: an operator goes with the library that defined it


def _defined_again(original: Any) -> type:
    """A class of libraries whose operators may be defined again: the newest kernels are called then."""

    class Library(original):  # type: ignore[misc]
        def __init__(self, ns: str, kind: str, dispatch_key: str = "") -> None:
            known = kind == "DEF" and any(other.ns == ns and other.kind == kind for other in _libraries)
            super().__init__(ns, "FRAGMENT" if known else kind, dispatch_key)
            _libraries.append(self)

        def define(self, schema: str, *args: Any, **kwargs: Any) -> Any:
            name, _, overload = schema.partition("(")[0].partition(".")
            packet = getattr(getattr(torch.ops, self.ns), name, None)
            same = packet is not None and (overload or "default") in packet.overloads()
            return name if same else super().define(schema, *args, **kwargs)

    return Library


def _alone(original: Callable[..., None]) -> Callable[..., None]:
    """A group of this process alone meets no other one: it needs no port, which another arm may hold."""

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if torch.distributed.is_initialized():
            return
        given = inspect.signature(original).bind(*args, **kwargs)
        size = given.arguments.get("world_size", -1)
        if (size if size > 0 else int(os.environ.get(WORLD, 0))) == 1:
            given.arguments.update(init_method=None, store=torch.distributed.HashStore(), rank=0, world_size=1)
        original(*given.args, **given.kwargs)

    return init_process_group
