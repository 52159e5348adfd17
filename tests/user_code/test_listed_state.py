"""An optimizer may keep its state in lists of its own, an entry of each parameter, as foreach operations take it."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

PROGRAM = """
import torch
from torch import nn

def Model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def get_inputs():
    return [torch.randn(8, 4), torch.randn(8, 2)]

{}

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""
TORCHS = PROGRAM.format("""
def get_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
""")
LISTS = PROGRAM.format("""
class Flat(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})
        self.t, self.m, self.v = 0, None, None

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        params, (one, two) = group["params"], group["betas"]
        grads = [p.grad for p in params]
        if self.m is None:
            self.m, self.v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
        self.t += 1
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(self.m, grads, 1 - one)
        torch._foreach_mul_(self.v, two)
        torch._foreach_addcmul_(self.v, grads, grads, 1 - two)
        below = torch._foreach_sqrt(self.v)
        torch._foreach_div_(below, (1 - two**self.t) ** 0.5)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(params, self.m, below, -group["lr"] / (1 - one**self.t))

def get_optimizer(params):
    return Flat(params)
""")


MADE_LATER = LISTS.replace("self.t, self.m, self.v = 0, None, None", "self.t = 0").replace(
    "self.m is None", "not hasattr(self, 'm')"
)


@pytest.mark.parametrize(
    ("first", "second"),
    [(TORCHS, LISTS), (LISTS, TORCHS), (TORCHS, MADE_LATER)],
    ids=["in the second", "in the first", "an attribute that the first step makes"],
)
def test_state_in_lists_is_that_of_the_parameters(first: str, second: str, tmp_path: Path) -> None:
    result = compared(tmp_path, second, first)
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("grads, grads, 1 - two", "grads, grads, 1.1 - 1.1 * two"), ("grads, 1 - one", "grads, 1.1 - 1.1 * one")],
    ids=["squares", "averages"],
)
def test_another_update_of_lists_is_another_optimizer(right: str, wrong: str, tmp_path: Path) -> None:
    assert right in LISTS
    result = compared(tmp_path, LISTS.replace(right, wrong), TORCHS)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
