"""What Triton's interpreter does to bfloat16 is put right: it cuts off where a GPU rounds, and multiplies the bits."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from optexp.kernelkit import kernel, tuning


@pytest.fixture(autouse=True)
def _somewhere(request: pytest.FixtureRequest) -> None:
    """On a machine with a GPU that is where kernels are tested."""
    called = getattr(request.node, "callspec", None)
    if called is not None and called.params.get("device") == "cpu":
        request.getfixturevalue("interpreted")


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels run on calls that would otherwise be torch's."""
    monkeypatch.setattr(kernel, "SMALL", 0)


@pytest.fixture(autouse=True)
def _first_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first config of several: compiling all for every shape would take long; other tests run each config."""
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_remembered", lambda file: {})
    monkeypatch.setattr(tuning, "_remember", lambda file, label, index: None)
    monkeypatch.setattr(tuning, "_race", lambda candidates, run, device: 0)


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounding(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        rounded = torch.tensor(np.asarray(values, np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    def multiplied(self: Any, a: Any, b: Any, *args: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_ext(operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *args)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For whoever needs a third of a card: processes side by side take turns, and leave nothing behind."""
    torch.cuda.empty_cache()
    with (tmp_path_factory.getbasetemp().parent / "much_memory.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted, float16 goes the way of bfloat16 and takes minutes; on a GPU every dtype runs."""
    for item in items:
        if "test_as_good_as_the_reference[" in item.name and "interpreted" in item.name and "-float16" in item.name:
            item.add_marker(pytest.mark.slow)
