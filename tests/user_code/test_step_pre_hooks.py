"""Hooks before an optimizer's step that change gradients, parameters or rates, beside the same lines in the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

HEAD = """
import torch
from torch import nn

def Model():
    return nn.Linear(4, 2)

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def change(parameters):
    for p in parameters:
        CHANGE

def hook(optimizer, args, kwargs):
    with torch.no_grad():
        change(optimizer.param_groups[0]["params"])

def get_optimizer(params):
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    REGISTER
    return optimizer
"""
STEP = """
def train_step(model, batch, optimizer):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    INLINE
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
LOSS = """
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""
WRITES = """
import torch

class Writes(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.add_(p, alpha=0.01), alpha=self.param_groups[0]["lr"])
"""
SCALE, REPLACE, DECAY = "p.grad.mul_(0.5)", "p.grad = p.grad * 0.5", "p.mul_(0.99)"
SLOW = pytest.mark.slow


def hooked(change: str, step: str = STEP) -> str:
    text = HEAD.replace("CHANGE", change).replace("REGISTER", "optimizer.register_step_pre_hook(hook)")
    return text + step.replace("    INLINE\n", "")


def inline(change: str) -> str:
    text = HEAD.replace("CHANGE", change).replace("    REGISTER\n", "")
    return text + STEP.replace("INLINE", "hook(optimizer, (), {})")


@pytest.mark.parametrize("change", [SCALE, pytest.param(REPLACE, marks=SLOW), pytest.param(DECAY, marks=SLOW)])
def test_a_hook_is_as_good_as_a_line_of_the_step(change: str, tmp_path: Path) -> None:
    result = compared(tmp_path, inline(change), hooked(change))
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize("change", [SCALE, pytest.param(DECAY, marks=SLOW)])
def test_a_hook_beside_a_loss_is_verified(change: str, tmp_path: Path) -> None:
    result = compared(tmp_path, hooked(change, LOSS), hooked(change, LOSS))
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEP, LOSS], ids=["a step", "a loss"])
@pytest.mark.parametrize("change", [SCALE, DECAY])
def test_one_that_changes_otherwise_is_another(change: str, step: str, tmp_path: Path) -> None:
    other = change.replace("0.5", "0.51").replace("0.99", "0.9902")
    result = compared(tmp_path, hooked(other, step), hooked(change, step))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEP, LOSS], ids=["a step", "a loss"])
@pytest.mark.parametrize(("factor", "verdict"), [("0.5", Verdict.VERIFIED), ("0.51", Verdict.NOT_EQUIVALENT)])
def test_a_hook_scales_before_the_optimizer_writes(factor: str, verdict: Verdict, step: str, tmp_path: Path) -> None:
    first = WRITES + hooked(SCALE, step).replace("torch.optim.SGD(params, lr=0.1, momentum=0.9)", "Writes(params)")
    result = compared(tmp_path, first.replace("mul_(0.5)", f"mul_({factor})"), first)
    assert result.verdict is verdict, result.headline
