"""A baseline whose gradients add up in another order in each run, as atomic adds on a GPU do."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.two_files import compared

NETWORK = """
import random
import torch
from torch import nn

order = random.SystemRandom()

class Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return x + bias[:, None, None]

    @staticmethod
    def backward(ctx, gradient):
        total = torch.zeros(gradient.shape[1], dtype=gradient.dtype)
        terms = list(gradient.transpose(0, 1).flatten(1).unbind(1))
        order.shuffle(terms)
        for term in terms:
            total += term
        return gradient, total

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.zeros(8))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(Bias.apply(self.conv(x), self.bias)).relu().mean((2, 3)))

def get_inputs():
    return [torch.randn(4, 3, 8, 8), torch.randint(4, (4,))]

loss = nn.CrossEntropyLoss()

def get_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
"""


def test_the_state_of_a_bias_before_a_batch_norm_is_rounding_alone(tmp_path: Path) -> None:
    result = compared(tmp_path, NETWORK, NETWORK)
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(("old", "new"), [("lr=1e-3", "lr=2e-3"), (".relu()", ".relu().mul(1.01)")])
def test_other_results_are_told_from_them(old: str, new: str, tmp_path: Path) -> None:
    result = compared(tmp_path, NETWORK, NETWORK.replace(old, new))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
