"""Bounds and constants of training that usual inputs do not meet show in a short verification."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

BEFORE = """
import torch
from torch import nn

def Model():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

def get_inputs():
    return [torch.randn(32, 16), torch.randint(4, (32,))]

def get_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 20.0)
    optimizer.step()
    return loss
"""
WITHOUT_NORM = BEFORE.replace("nn.BatchNorm1d(32), ", "")


@pytest.mark.parametrize(
    ("first", "old", "new"),
    [
        (WITHOUT_NORM, "    nn.utils.clip_grad_norm_(model.parameters(), 20.0)\n", ""),
        (BEFORE, "BatchNorm1d(32)", "BatchNorm1d(32, eps=1.1e-5)"),
    ],
    ids=["no clipping", "another eps"],
)
def test_what_usual_inputs_do_not_meet_is_seen(first: str, old: str, new: str, tmp_path: Path) -> None:
    assert old in first
    result = compared(tmp_path, first.replace(old, new), first)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "inputs" in result.headline


def test_the_same_bound_in_other_words_is_verified(tmp_path: Path) -> None:
    by_hand = "norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()\n    "
    by_hand += "for p in model.parameters(): p.grad.mul_((20.0 / (norm + 1e-6)).clamp(max=1.0))"
    second = WITHOUT_NORM.replace("nn.utils.clip_grad_norm_(model.parameters(), 20.0)", by_hand)
    result = compared(tmp_path, second, WITHOUT_NORM)
    assert result.verdict is Verdict.VERIFIED, result.headline
