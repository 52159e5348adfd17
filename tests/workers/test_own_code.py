"""optexp's own functions in a process are told from those that code under test put in their places."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

import optexp.strategies.inplace
from optexp.equivalence import bits, gates
from optexp.python_state import variables
from optexp.support import own_code
from optexp.workers.arm_program import Holder


def other(*args: Any) -> Any:
    return None


def another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(gates.measure, FunctionType)
    monkeypatch.setattr(gates.measure, "__code__", other.__code__)


CHANGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a function": (lambda patch: patch.setattr(gates, "measure", other), "optexp.equivalence.gates.measure"),
    "its code": (another_code, "optexp.equivalence.gates.measure"),
    "a method": (lambda patch: patch.setattr(Holder, "runner", other), "optexp.workers.arm_program.Holder.runner"),
    "a class": (lambda patch: patch.setattr(bits, "Bits", int), "optexp.equivalence.bits.Bits"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_replaced_is_named(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, name = CHANGES[change]
    before = own_code.functions()
    make(monkeypatch)
    found = own_code.replaced(before)
    assert name in found
    monkeypatch.undo()
    assert own_code.replaced(before) == []


def test_strategies_are_no_part_of_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_code.functions()
    monkeypatch.setattr(optexp.strategies.inplace, "added", other, raising=False)
    assert not any(name.startswith("optexp.strategies") for name in before)
    assert own_code.replaced(before) == []


def test_a_cached_function_that_was_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_code.functions()
    monkeypatch.setattr(variables, "_set", lambda code, variable: frozenset())
    assert own_code.replaced(before) == ["optexp.python_state.variables._set"]


@pytest.fixture
def imports_in_collections() -> Iterator[None]:
    """Each garbage collection imports a module, as a finalizer may."""
    made, before = list[str](), gc.get_threshold()

    def imports(phase: str, info: dict[str, Any]) -> None:
        made.append(f"imported_{len(made)}")
        sys.modules[made[-1]] = ModuleType(made[-1])

    gc.callbacks.append(imports)
    gc.set_threshold(1)
    yield
    gc.callbacks.remove(imports)
    gc.set_threshold(*before)
    for name in made:
        del sys.modules[name]


def test_a_garbage_collection_that_imports_is_no_error(imports_in_collections: None) -> None:
    assert "optexp.support.own_code.functions" in own_code.functions()
