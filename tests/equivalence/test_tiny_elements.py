"""Scattered elements far below a result's RMS, as small probabilities: they must be right at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Spread(nn.Module):
    """Results of many sizes.

    how: computes them
    """

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(192, 64), how

    def forward(self, x):
        return self.how(self.linear(x.flatten(1)))


def softmax(y):
    return torch.softmax(40 * y, -1)


RIGHT = {
    "softmax": (softmax, lambda y: (40 * y - torch.logsumexp(40 * y, -1, keepdim=True)).exp()),
    "shifted softmax": (softmax, lambda y: torch.softmax(40 * (y - y[:, :1]), -1)),
    "sigmoid": (lambda y: torch.sigmoid(40 * y), lambda y: 1 / (1 + torch.exp(-40 * y))),
    "gelu": (lambda y: nn.functional.gelu(8 * y), lambda y: 4 * y * (1 + torch.erf(8 * y / 2**0.5))),
    "residual": (lambda y: y + y.flip(0) - 1, lambda y: y - 1 + y.flip(0)),
}
WRONG = {
    "pruned": (softmax, lambda y: torch.where(softmax(y) < 1e-9, 0, softmax(y))),
    "clamped": (lambda y: torch.exp(12 * y), lambda y: torch.exp((12 * y).clamp(min=-1))),
    "absolute": (lambda y: torch.sigmoid(40 * y), lambda y: (1 + torch.tanh(20 * y)) / 2),
}


def replaced(how):
    def change(program):
        program.model.how = how
        return program

    return change


@pytest.mark.parametrize("name", RIGHT)
def test_other_ways_to_the_same_numbers_pass(check, net, name):
    first, other = RIGHT[name]
    found = check(net(mode="forward", make=lambda: Spread(first), batch_size=64), replaced(other))
    assert found.ok, found.headline


@pytest.mark.parametrize("name", WRONG)
def test_elements_that_are_something_else_fail(check, net, name):
    first, other = WRONG[name]
    found = check(net(mode="forward", make=lambda: Spread(first), batch_size=64), replaced(other))
    assert not found.ok
    assert found.worst.tensor.startswith("output (elements near 2^-")
    row, column = found.worst.element.index
    assert max(row, column) < 64
