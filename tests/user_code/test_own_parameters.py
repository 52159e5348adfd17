"""A module may define `parameters()` without torch's arguments, as meta-learners do."""

from __future__ import annotations

from pathlib import Path

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

LEARNER = """
import torch
from torch import nn

class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(2))])

    def forward(self, x):
        return nn.functional.linear(x, *self.vars)

    def parameters(self):
        return self.vars

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Learner()

    def forward(self, x):
        return self.net(x)

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""


def test_a_module_may_define_parameters_by_itself(tmp_path: Path) -> None:
    result = compared(tmp_path, LEARNER, LEARNER)
    assert result.verdict is Verdict.VERIFIED, result.headline
