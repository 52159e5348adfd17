"""Operators by the line that calls them: calls, backward functions with their forward operator, inner ones by line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.profiling.lines import lines, origins
from optexp.profiling.operators import BACKWARD
from optexp.trace import Trace, record_once
from optexp.workers.line_marks import lines_marked

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = y * 2 + y.shape[0]
        return torch.relu(z)


FIRST = Net.forward.__code__.co_firstlineno


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    net, x = Net(), torch.randn(128, 64)

    def step() -> None:
        net(x).sum().backward()

    step()
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    with lines_marked():
        record_once(step, path, CPU)
    return Trace.read(path)


def test_an_operator_has_its_line_whether_a_function_or_an_operator_sign_called_it(trace: Trace) -> None:
    found = {(row.operator, row.place.rpartition(":")[2]): row for row in lines(trace)}
    for operator, line in (("aten::linear", 1), ("aten::mul", 2), ("aten::add", 2), ("aten::relu", 3)):
        row = found[operator, str(FIRST + line)]
        assert row.calls == 1
        assert row.place.startswith(__file__)
    assert sum(row.host_share for row in found.values()) <= 1.0 + 1e-9


def test_backward_functions_count_for_the_line_of_their_forward_operator(trace: Trace) -> None:
    linear = next(row for row in lines(trace) if row.operator == "aten::linear")
    forward = [op.duration for op in trace.ops if op.name == "aten::linear"]
    theirs = [op for op in trace.ops if op.name.startswith(BACKWARD)]
    backward = [op.duration for op in theirs if op.name.endswith(("AddmmBackward0", ": TBackward0"))]
    assert linear.host_us == pytest.approx(sum(forward) + sum(backward))


def test_inner_operators_come_from_the_line_around_them(trace: Trace) -> None:
    found = origins(trace)
    assert found["aten::addmm"].endswith(f":{FIRST + 1}")
    assert found["aten::mm"].endswith(f":{FIRST + 1}")  # of the backward pass
    assert found["aten::threshold_backward"].endswith(f":{FIRST + 3}")


def test_without_marks_there_is_no_line(tmp_path: Path) -> None:
    record_once(lambda: torch.ones(2) + 1, tmp_path / "trace.json.gz", CPU)
    plain = Trace.read(tmp_path / "trace.json.gz")
    assert lines(plain) == []
    assert origins(plain) == {}
