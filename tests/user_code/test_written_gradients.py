"""An optimizer may write its update into gradients: an fp64 step starts from those that it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

NESTEROV = """
import torch
from torch import nn

class Nesterov(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                p.add_(p.grad.lerp_(momentum, 0.9), alpha=-group["lr"])

def Model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    return Nesterov(params)
"""
OWN = """
def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""
LOSS = """
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""
STEPS = [
    pytest.param(NESTEROV + OWN, id="own step"),
    pytest.param(NESTEROV + LOSS, id="optexp's step", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("before", STEPS)
@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ("momentum.mul_(0.9).add_(p.grad, alpha=0.1)", Verdict.VERIFIED),
        ("momentum.lerp_(p.grad, 0.101)", Verdict.NOT_EQUIVALENT),
    ],
    ids=["another form", "another rate"],
)
def test_a_momentum_in_the_gradient_is_judged(before: str, new: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, before.replace("momentum.lerp_(p.grad, 0.1)", new), before)
    assert result.verdict is verdict, result.headline


NARROW = """
import torch
from torch import nn

class Whitened(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                x = p.grad.bfloat16() / (p.grad.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.mT
                    b = -1.25 * a + 0.375 * a @ a
                    x = 1.875 * x + b @ x
                p.add_(x, alpha=-group["lr"])

def Model():
    return nn.Linear(16, 8, bias=False)

def get_inputs():
    return [torch.randn(8, 16), torch.randint(8, (8,))]

def get_optimizer(params):
    return Whitened(params)
"""


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("-1.25 * a + 0.375 * a @ a", "torch.addmm(a, a, a, beta=-1.25, alpha=0.375)", Verdict.UNVERIFIED),
        ("alpha=-group", "alpha=-2 * group", Verdict.NOT_EQUIVALENT),
    ],
    ids=["another form", "another rate"],
)
def test_the_rounding_of_an_optimizer_in_bfloat16_is_no_error(
    old: str, new: str, verdict: Verdict, tmp_path: Path
) -> None:
    before = NARROW + OWN
    result = compared(tmp_path, before.replace(old, new), before)
    assert result.verdict is verdict, result.headline
    assert verdict is Verdict.NOT_EQUIVALENT or "computes in bfloat16" in result.headline
