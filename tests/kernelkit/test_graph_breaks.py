"""Graph breaks of real programs are named with file and line; so are guards that fail until torch gives up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optexp.kernelkit import toolchain
from optexp.kernelkit.dynamo_words import cause, guard, last_frame
from optexp.strategies import fusion
from optexp.strategy import grouped
from tests.kernelkit import broken
from tests.kernelkit.broken import line


@pytest.fixture
def compiled() -> Iterator[None]:
    from torch._dynamo import reset, utils

    for clear in (reset, utils.counters.clear, utils.clear_compilation_metrics):
        clear()
    yield
    for clear in (reset, utils.counters.clear, utils.clear_compilation_metrics):
        clear()


VALUE = line(broken.reads_a_value, ".item()")
PRINT = line(broken.prints, "print(")
BRANCH = line(broken.branches_on_a_value, "if ")
LOOP = line(broken.prints_in_a_loop, "print(")
OFTEN = [line(broken.breaks_often, text) for text in ("print(", "graph_break()", "if ")]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("program", "named"),
    [
        (broken.reads_a_value, f", 1 graph break: {VALUE} (Tensor.item())"),
        (broken.prints, f", 1 graph break: {PRINT} (call of print)"),
        (broken.branches_on_a_value, f", 1 graph break: {BRANCH} (branch on the value of a tensor)"),
        (broken.Inner(), f", 1 graph break: {BRANCH} (branch on the value of a tensor)"),
        (
            broken.breaks_often,
            f", 3 graph breaks: {OFTEN[0]} (call of print), {OFTEN[1]} (call of torch._dynamo.graph_break()),"
            f" {OFTEN[2]} (branch on the value of a tensor)",
        ),
        (
            broken.prints_in_a_loop,
            f", not compiled for a graph break that cannot be resumed: {LOOP} (call of print)",
        ),
        (torch.nn.Linear(4, 4), ""),
    ],
    ids=["item", "print", "branch", "in a module", "several", "in a loop", "none"],
)
def test_a_graph_break_is_named_with_its_line(program, named: str) -> None:
    call = torch.compile(program, backend="eager")
    for _ in range(2):
        call(torch.ones(4, 4))
    assert fusion.graph_breaks(toolchain.counted()) == named


@pytest.mark.usefixtures("compiled")
def test_a_program_that_recompiles_for_each_value_is_named_with_the_line_of_its_guard() -> None:
    call = torch.compile(broken.Counting(), backend="eager")
    for _ in range(11):
        call(torch.ones(4))
    where = line(broken.Counting.forward, "self.calls += 1")
    assert grouped(toolchain.counted(), "given_up") == {f"value of self.calls ({where})": 8.0}
    assert fusion.graph_breaks(toolchain.counted()) == ""  # a limit that was reached is no graph break
    assert fusion.given_up(toolchain.counted(), 1).startswith(
        f"; compiled anew for each value of self.calls ({where}), up to torch's limit of 8"
    )


def test_reasons_in_few_words() -> None:
    skipped = "Attempted to call function marked as skipped\n  Explanation: Dynamo cannot trace the builtin `_x.dumps.`"
    assert cause(skipped) == "Attempted to call function marked as skipped (_x.dumps)"
    assert cause("Something new") == "Something new"
    assert guard("2/0: self.k == 0          # self.k += 1  # a.py:3 in f\nUser stack trace:\n") == "self.k == 0"
    assert last_frame('x\nUser stack trace:\n  File "/a/net.py", line 16, in forward\n    self.k += 1') == "net.py:16"
    assert last_frame("no frame") == ""
