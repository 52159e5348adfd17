"""A user's step whose optimizer computes numbers of its groups from tensors, as Prodigy and D-Adaptation do."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.two_files import compared

DISTANCE = """
import torch
from torch import nn

class Distance(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=1.0, d=1e-3, far=0.0, near=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            far, near = 0.9 * group["far"], 0.0
            for p in group["params"]:
                first = self.state[p].setdefault("first", p.clone())
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                far += group["d"] * torch.dot(p.grad.flatten(), (first - p).flatten()).item()
                near += mean.lerp_(p.grad, 0.1).abs().sum().item()
            group["far"], group["near"] = far, near
            group["d"] = max(group["d"], 10.0 * far / near, 1.01 * group["d"])
            for p in group["params"]:
                p.sub_(self.state[p]["mean"], alpha=group["d"] * group["lr"])

def Model():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))

def get_inputs():
    return [torch.randn(16, 6), torch.randint(4, (16,))]

def get_optimizer(parameters):
    return Distance(parameters)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""


def test_a_sum_in_another_order_gives_the_same_numbers(tmp_path: Path) -> None:
    dot = "torch.dot(p.grad.flatten(), (first - p).flatten())"
    result = compared(tmp_path, DISTANCE, DISTANCE.replace(dot, "(p.grad * (first - p)).flip(0).sum(0).sum()"))
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('0.9 * group["far"]', '0.8 * group["far"]'),
        ("1.01 *", "1.02 *"),
        ("lr=1.0", "lr=1.001"),
        ("d=1e-3", "d=1.1e-3"),
    ],
)
def test_other_numbers_are_refused(old: str, new: str, tmp_path: Path) -> None:
    result = compared(tmp_path, DISTANCE, DISTANCE.replace(old, new))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
