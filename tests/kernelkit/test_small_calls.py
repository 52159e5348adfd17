"""What C++ answers, Python would answer too, had it looked; and what it is not certain of it leaves to Python."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from optexp.kernelkit import kernel, small_calls
from optexp.kernelkit.kernel import LEARNING, SMALL
from optexp.kernelkit.recording import rehearsal, rehearsals

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
needs_gpu = pytest.mark.gpu

ASKED = "Python was asked"
READ = (SMALL, LEARNING, rehearsals)  # among the globals of a function, by what stands in front of it


@pytest.fixture(scope="module")
def front() -> ModuleType:
    return small_calls.compiled("CPU")


@pytest.fixture
def ask(front: ModuleType) -> Callable[..., Any]:
    """ask(name, *args): what the function in front of `optexp.kernelkit.kernel`'s of this name answers."""

    def ask(name: str, *args: Any) -> Any:
        def python(*_: Any) -> str:
            return ASKED

        python.__name__ = name
        return small_calls.in_front_of(python, front)(*args)

    return ask


def fake(*shape: int, **how: Any) -> torch.Tensor:
    """Of any size without memory."""
    return torch.zeros(1, **how).expand(shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernel.SUPPORTED)
def test_a_small_tensor_is_small(dtype: torch.dtype, ask: Callable[..., Any]) -> None:
    x = torch.zeros(3, 5, dtype=dtype)
    assert ask("is_small", x) is True
    assert ask("is_small", torch.nn.Parameter(x)) is True
    assert ask("is_small", x[0, 0], 3) is True
    assert ask("is_small_with_row", x, x[0], 1.5) is True
    assert ask("are_small_alike", x, x.clone(), 0.5) is True


@pytest.mark.parametrize("operations", [1, 3, 0.5])
@pytest.mark.parametrize("learns", [False, True])
def test_the_limits_are_those_of_python(operations: float, learns: bool, ask: Callable[..., Any]) -> None:
    limit = round(SMALL * (LEARNING if learns else 1) / operations)
    below, above = (fake(size).requires_grad_(learns) for size in (limit - 1, limit + 1))
    assert ask("is_small", below, operations) is True
    assert ask("is_small", above, operations) is ASKED
    with torch.no_grad():
        assert ask("is_small", below, operations) is (ASKED if learns else True)


def test_what_python_is_asked(ask: Callable[..., Any]) -> None:
    x, row = torch.zeros(3, 5), torch.zeros(5)
    for other in (None, 1.0, [1.0], x.int(), x.bool(), x.to(torch.complex64), torch.Tensor):
        assert ask("is_small", other) is ASKED
        assert ask("are_small_alike", other, x, 1) is ASKED
        assert ask("are_small_alike", x, other, 1) is ASKED
        assert ask("is_small_with_row", other, row, 1) is ASKED
        assert ask("is_small_with_row", x, other, 1) is ASKED
    assert ask("is_small", x.to("meta")) is ASKED
    for bad in (row[:4], row[None], x, row.double(), torch.zeros(())):
        assert ask("is_small_with_row", x, bad, 1) is ASKED
        assert ask("are_small_alike", x, bad, 1) is (True if bad is x else ASKED)
    number = torch.zeros(())
    assert ask("are_small_alike", number, number, 1) is ASKED
    assert ask("is_small_with_row", number, number, 1) is ASKED
    with pytest.raises(TypeError):
        ask("is_small", x, "many")


def test_a_subclass_may_say_something_else(ask: Callable[..., Any]) -> None:
    class Own(torch.Tensor):
        pass

    x = torch.zeros(4)
    assert ask("is_small", x.as_subclass(Own)) is ASKED
    assert ask("are_small_alike", x, x.as_subclass(Own), 1) is ASKED


def test_a_tensor_without_sizes_is_no_error(ask: Callable[..., Any]) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    assert ask("are_small_alike", nested, nested, 1) is ASKED


def test_a_limit_that_is_changed_is_another_limit(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4)
    monkeypatch.setattr(sys.modules[__name__], "SMALL", 4)
    assert ask("is_small", x) is ASKED
    assert ask("is_small", x[:3]) is True
    assert ask("is_small", x.requires_grad_()) is True


def test_nothing_is_small_in_a_rehearsal(ask: Callable[..., Any]) -> None:
    x = torch.zeros(4)
    with rehearsal():
        assert ask("is_small", x) is ASKED
    assert ask("is_small", x) is True


def test_compiled_code_sees_the_function_in_python(front: ModuleType) -> None:
    def is_small(x: torch.Tensor) -> bool:
        return bool(torch.compiler.is_compiling() and x.shape[0] == 4)

    small = small_calls.in_front_of(is_small, front)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if small(x) else x - 1

    x = torch.zeros(4)
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), x + 1)
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x[:3]), x[:3] - 1)


def test_who_cannot_build_it_asks_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(small_calls, "NVIDIA", True)
    monkeypatch.setattr(small_calls, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for compiler in ("no-such-compiler", "false", r"sh -c 'printf \377 >&2; exit 1'"):
        monkeypatch.setenv("CXX", compiler)
        small_calls._front.cache_clear()
        assert small_calls.quick(test_a_small_tensor_is_small) is test_a_small_tensor_is_small
    monkeypatch.setattr(small_calls, "kept", lambda name: Path("~nobody-of-this-name").expanduser() / name)
    small_calls._front.cache_clear()
    assert small_calls.quick(test_a_small_tensor_is_small) is test_a_small_tensor_is_small
    small_calls._front.cache_clear()


def test_what_cannot_be_imported_is_built_again(
    front: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "small_calls.so"
    library.write_bytes(b"half of a library")
    monkeypatch.setattr(small_calls, "kept", lambda name: library)
    with pytest.raises(ImportError):
        small_calls.compiled("CPU")
    assert not library.exists()


def test_what_is_no_function_has_nothing_in_front(front: ModuleType) -> None:
    with pytest.raises(TypeError, match="no function"):
        front.quick(len)
    with pytest.raises(ValueError, match="nothing answers"):
        front.quick(test_a_small_tensor_is_small)


@needs_gpu
def test_on_a_gpu_it_answers_in_front_of_python() -> None:
    for name in ("is_small", "is_small_with_row", "are_small_alike"):
        assert type(getattr(kernel, name)).__name__ == "builtin_function_or_method"


@needs_gpu
def test_on_a_gpu_the_limit_of_python_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(16, device="cuda")
    assert kernel.is_small(x)
    monkeypatch.setattr(kernel, "SMALL", 0)
    assert not kernel.is_small(x)
    assert not kernel.are_small_alike(x, x, 1)


@needs_gpu
def test_a_stream_that_is_captured_makes_no_call_small() -> None:
    x = torch.zeros(16, device="cuda")
    assert kernel.is_small(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert kernel.is_small(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            assert not kernel.is_small(x)
    assert kernel.is_small(x)
