"""Steps that keep their parameters, where rounding alone drives some: a bias before a norm, under Adam."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

BEFORE = """
import torch
from torch import nn

kept, calls = [torch.zeros(8)], [0]

def Model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01)

def train_step(model, batch, optimizer):
    calls[0] += 1
    if calls[0] % 6 == 0:
        kept[0] = model[0].bias.detach().clone()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""
ROUNDED = BEFORE.replace("return nn.Sequential(nn.Linear(4, 8)", "return nn.Sequential(Scaled(4, 8)").replace(
    "def Model",
    "class Scaled(nn.Linear):\n    def forward(self, x):\n"
    "        return (3 * x) @ (self.weight / 3).T + self.bias\n\ndef Model",
)


@pytest.mark.slow
def test_nobody_is_blamed_for_what_rounding_moves(tmp_path: Path) -> None:
    result = compared(tmp_path, ROUNDED, BEFORE)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "such a layer needs no bias" in result.headline


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [("= model", "= 2 * model"), ("kept[0] =", "_ =")], ids=["twice", "nothing"])
def test_what_is_kept_wrongly_does_not_pass(old: str, new: str, tmp_path: Path) -> None:
    result = compared(tmp_path, ROUNDED.replace(old, new), BEFORE)
    assert result.verdict in (Verdict.NOT_EQUIVALENT, Verdict.UNVERIFIED), result.headline


@pytest.mark.slow
def test_a_loss_that_is_kept_may_drift(tmp_path: Path) -> None:
    """As that of a validation, for early stopping."""
    keeps = "kept[0] = float(nn.functional.cross_entropy(model.eval()(batch[0]), batch[1]))\n        model.train()"
    before, after = (text.replace("kept[0] = model[0].bias.detach().clone()", keeps) for text in (BEFORE, ROUNDED))
    before, after = (text.replace("kept, calls = [torch.zeros(8)]", "kept, calls = [0.0]") for text in (before, after))
    result = compared(tmp_path, after, before)
    assert result.verdict is Verdict.VERIFIED, result.headline
    other = compared(tmp_path, after.replace("kept[0] = float", "kept[0] = 1.5 * float"), before)
    assert other.verdict is Verdict.NOT_EQUIVALENT, other.headline


@pytest.mark.slow
def test_weights_that_are_kept_are_compared(tmp_path: Path) -> None:
    before, after = (text.replace("model[0].bias", "model[2].weight") for text in (BEFORE, ROUNDED))
    assert compared(tmp_path, after, before).verdict is Verdict.VERIFIED
    twice = compared(tmp_path, after.replace("= model", "= 1.01 * model"), before)
    assert twice.verdict is Verdict.NOT_EQUIVALENT, twice.headline
