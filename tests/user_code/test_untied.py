"""A second program without the first one's tie has a parameter that nothing can be held against."""

from __future__ import annotations

from pathlib import Path

from optexp.result import Verdict
from tests.two_files import compared

TIED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x))

def get_inputs():
    return [torch.randint(10, (8,)), torch.randint(10, (8,))]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""


def test_the_parameter_is_named(tmp_path: Path) -> None:
    result = compared(tmp_path, TIED, TIED.replace("        self.out.weight = self.embed.weight\n", ""))
    assert result.verdict is Verdict.ERROR
    assert "trains out.weight, and the baseline's has no such parameter" in result.headline
