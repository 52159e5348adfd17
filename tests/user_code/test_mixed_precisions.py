"""A model with bfloat16 beside float32 keeps its precisions, in both programs and in fp64's."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

PROGRAM = """
import torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).bfloat16()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.net(x.bfloat16()).float()
        return self.head(self.norm(x + hidden))

def get_inputs():
    return [torch.randn(16, 16), torch.randint(4, (16,))]

loss_fn = nn.CrossEntropyLoss()
get_optimizer = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
"""
BODY = "hidden = self.net(x.bfloat16()).float()"
BY_HAND = "hidden = F.linear(self.net[0](x.to(torch.bfloat16)).relu(), self.net[2].weight, self.net[2].bias).float()"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        pytest.param(BODY, BY_HAND, Verdict.VERIFIED, id="by hand"),
        pytest.param("self.norm(x + hidden)", "self.norm(x + 0.95 * hidden)", Verdict.NOT_EQUIVALENT, id="a factor"),
        pytest.param("momentum=0.9", "momentum=0.85", Verdict.NOT_EQUIVALENT, id="momentum", marks=pytest.mark.slow),
    ],
)
def test_a_second_program_is_judged(old: str, new: str, verdict: Verdict, tmp_path: Path) -> None:
    assert old in PROGRAM
    result = compared(tmp_path, PROGRAM.replace(old, new), PROGRAM)
    assert result.verdict is verdict, result.headline


NARROW = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.to(torch.bfloat16)
    def forward(self, x): return self.second(self.first(x).relu())

def get_inputs(): return [torch.randn(4, 8, dtype=torch.bfloat16), torch.randint(3, (4,))]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def loss(outputs, batch): return nn.functional.cross_entropy(outputs, batch[1])
"""


def test_a_second_program_that_casts_by_itself_is_told_which_setting_it_needs(tmp_path: Path) -> None:
    result = compared(tmp_path, NARROW.replace("first(x)", "first(x.to(torch.bfloat16))"), NARROW)
    assert result.verdict is Verdict.ERROR
    assert "second.py:10, in forward, " in result.headline
    assert "parameters in bfloat16 became float32 (dtype=)" in result.headline
    assert result.headline.endswith("set dtype= to what the model needs")
