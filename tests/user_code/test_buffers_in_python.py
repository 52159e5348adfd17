"""Buffers that steps change, which a second file keeps in Python, or the other way round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from optexp.program import Program, Snapshot
from optexp.result import Verdict
from tests.two_files import compared

PROGRAM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        BEGIN

    def forward(self, x):
        STEP
        return self.net(x) + 1 / (2 + SEEN)

def get_inputs():
    return torch.randn(8, 4)
"""


def program(begin: str, step: str, seen: str = "self.seen") -> str:
    return PROGRAM.replace("BEGIN", begin).replace("STEP", step).replace("SEEN", seen)


BUFFER = program('self.register_buffer("seen", torch.tensor(0))', "self.seen += 1")
NUMBER = program("self.calls = 0", "self.calls += 1", "self.calls")
UNREAD = program('self.register_buffer("seen", torch.tensor(0))', "self.seen += 1", "1"), program("pass", "pass", "1")
MEAN = "0.9 * self.mean + 0.{} * x.mean(){}"
REAL = [
    program('self.register_buffer("mean", torch.tensor(0.0))', f"self.mean.copy_({MEAN.format(1, '')})", "self.mean"),
    *(program("self.mean = 0.0", f"self.mean = {MEAN.format(by, '.item()')}", "1") for by in ("1", "101")),
]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        pytest.param(BUFFER, NUMBER, Verdict.VERIFIED, id="a number for a buffer"),
        pytest.param(NUMBER, BUFFER, Verdict.VERIFIED, id="a buffer for a number"),
        pytest.param(*UNREAD, Verdict.UNVERIFIED, id="a count left out"),
        pytest.param(BUFFER, NUMBER.replace("+= 1", "+= 2"), Verdict.NOT_EQUIVALENT, id="another pace"),
    ],
)
def test_each_changes_as_the_other_does(first: str, second: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, first, second, "workload.mode=forward")
    assert result.verdict is verdict, result.headline


@pytest.mark.parametrize(("by", "right"), [(1, True), (2, False)])
def test_a_real_number_that_no_result_shows(by: int, right: bool, tmp_path: Path) -> None:
    first = REAL[0].replace("1 / (2 + self.mean)", "0.5")
    result = compared(tmp_path, first, REAL[by].replace("1 / (2 + 1)", "0.5"), "workload.mode=forward")
    assert (result.verdict is Verdict.VERIFIED) is right, result.headline


def test_buffers_that_the_baseline_lacks_are_put_back() -> None:
    model = nn.BatchNorm1d(4)
    made = Program(model, lambda program, batch: {}, feed=None)  # type: ignore[arg-type]
    named = {name: made.alias(name) for name, _ in model.named_parameters()}
    start = Snapshot(made)
    made = replace(made, aliases=named, lacking=frozenset(name for name, _ in model.named_buffers()))
    start.remember(made)
    model(torch.randn(8, 4))
    start.restore(made)
    assert model.num_batches_tracked == 0
    assert not model.running_mean.any()
