"""Indices among equal values: another choice is no fault where torch promises no order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.equivalence.ties import Selections
from optexp.result import Verdict
from tests.two_files import compared

PROGRAM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        q = (x * 2).round().clamp(-2, 2) * self.scale
        return {}

def get_inputs():
    return torch.randn(16, 32)
"""
TOP, SORTED = "q.topk(3).indices", "q.sort(descending=True, stable=True).indices[:, :3]"
SHIFTED = "(q + 1.5 * (torch.arange(32) == 5)).topk(3).indices"
LARGEST, LAST = "q.argmax(-1)", "31 - q.flip(-1).argmax(-1)"
BOUND = "indices differ among equal values alone, of which torch.argmax gives the first"


@pytest.mark.parametrize(
    ("first", "second", "verdict", "told"),
    [
        pytest.param(TOP, SORTED, Verdict.VERIFIED, "", id="another of equal values"),
        pytest.param(TOP, SHIFTED, Verdict.NOT_EQUIVALENT, "must be equal (seed", id="a smaller value"),
        pytest.param(LARGEST, LAST, Verdict.NOT_EQUIVALENT, BOUND, id="not the first"),
    ],
)
def test_another_of_equal_values_is_a_pass(
    first: str, second: str, verdict: Verdict, told: str, tmp_path: Path
) -> None:
    result = compared(tmp_path, PROGRAM.format(first), PROGRAM.format(second), "workload.mode=forward")
    assert result.verdict is verdict, result.headline
    assert told in result.headline


def test_each_element_is_selected_once() -> None:
    with Selections() as noted:
        torch.tensor([[2.0, 1.0, 2.0, 2.0]]).topk(2)
        torch.tensor([1.0, 2.0]).max()
    (one,) = noted.found
    assert one.free
    assert one.led_alike(torch.tensor([[3, 0]]))
    for wrong in ([[3, 3]], [[0, 1]], [[0, 4]], [[0]]):
        assert not one.led_alike(torch.tensor(wrong))


@pytest.mark.parametrize("select", [torch.argmax, lambda x, **how: x.max(dim=how.get("dim", 0)).indices])
def test_selections_without_the_dimension(select: object) -> None:
    with Selections() as noted:
        select(torch.tensor([1.0, 3.0, 3.0]))  # type: ignore[operator]
        select(torch.tensor([[1.0, 3.0, 3.0]]), dim=1)  # type: ignore[operator]
    for one in noted.found:
        assert not one.free
        assert one.led_alike(torch.tensor([2]))
        assert not one.led_alike(torch.tensor([0]))
