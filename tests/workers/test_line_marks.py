"""Ranges around lines of the user's code: which line called each operator, exactly."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.profiling.operators import backward_of, lines_of
from optexp.python_state.variables import is_users_file
from optexp.trace import Trace, record_once
from optexp.workers import line_marks
from optexp.workers.line_marks import lines_marked

CPU = torch.device("cpu")
X = torch.ones(4, 4)


def inner(x: Tensor) -> Tensor:
    y = x.exp()
    return y.cos()


def step() -> Tensor:
    x = X + 1
    for _ in range(2):
        x = inner(x)
    return x.sum()


def recorded(run, path: Path) -> Trace:
    with lines_marked():
        record_once(run, path, CPU)
    return Trace.read(path)


def called(trace: Trace) -> dict[str, set[str | None]]:
    """Number of the line that called each operator."""
    found: dict[str, set[str | None]] = {}
    for op, line in zip(trace.ops, lines_of(trace, backward_of(trace)), strict=True):
        found.setdefault(op.name, set()).add(line and line.rpartition(":")[2])
    return found


def test_each_operator_has_the_line_that_called_it(tmp_path: Path) -> None:
    trace = recorded(step, tmp_path / "trace.json.gz")
    first, outer = inner.__code__.co_firstlineno, step.__code__.co_firstlineno
    lines = called(trace)
    assert lines["aten::exp"] == {str(first + 1)}
    assert lines["aten::cos"] == {str(first + 2)}
    assert lines["aten::add"] == {str(outer + 1)}
    assert lines["aten::sum"] == {str(outer + 4)}
    assert all(line.name.startswith(__file__) for line in trace.lines)
    assert not any(span.name.startswith("optexp.line") for span in trace.annotations)


def test_a_backward_function_has_its_forward_operators_line(tmp_path: Path) -> None:
    weight = torch.ones(4, 4, requires_grad=True)

    def learn() -> None:
        loss = (X @ weight).relu().sum()
        loss.backward()

    lines = called(recorded(learn, tmp_path / "trace.json.gz"))
    forward = str(learn.__code__.co_firstlineno + 1)
    assert lines["autograd::engine::evaluate_function: MmBackward0"] == {forward}
    assert lines["aten::threshold_backward"] == {forward}


def test_lines_that_raise_are_closed_and_a_debugger_stays(tmp_path: Path) -> None:
    def fails() -> None:
        torch.ones(2) @ torch.ones(3)

    def tries() -> Tensor:
        with contextlib.suppress(RuntimeError):
            fails()
        return X.exp()

    def debugger(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        lines = called(recorded(tries, tmp_path / "trace.json.gz"))
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert lines["aten::exp"] == {str(tries.__code__.co_firstlineno + 3)}


def test_a_loop_of_many_turns_is_marked_as_often_as_a_trace_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_marks, "MOST", 10)

    def turns() -> Tensor:
        for _ in range(100):
            pass
        return X.exp()

    trace = recorded(turns, tmp_path / "trace.json.gz")
    first = turns.__code__.co_firstlineno
    numbers = Counter(int(line.name.rpartition(":")[2]) for line in trace.lines)
    assert numbers[first + 1] <= 10
    assert called(trace)["aten::exp"] == {str(first + 3)}


def test_a_generator_that_goes_on_under_a_debugger_is_marked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            yield number

    def debugger(frame, event, argument):
        return None

    going, before = numbers(), sys.gettrace()
    sys.settrace(debugger)
    try:
        with lines_marked():
            next(going)
        monkeypatch.setattr(line_marks, "record_function", lambda name: pytest.fail(name))
        assert next(going) == 2
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("file", "users"),
    [(__file__, True), (nn.__file__, False), (sys.modules["optexp.trace"].__file__, False), ("<string>", False)],
)
def test_whose_a_file_is(file: str, users: bool) -> None:
    assert is_users_file(file) is users
