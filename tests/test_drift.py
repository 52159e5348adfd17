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
OTHER_ROUNDING = BEFORE.replace("return nn.Sequential(nn.Linear(4, 8)", "return nn.Sequential(Scaled(4, 8)").replace(
    "def Model",
    "class Scaled(nn.Linear):\n    def forward(self, x):\n"
    "        return (3 * x) @ (self.weight / 3).T + self.bias\n\ndef Model",
)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (OTHER_ROUNDING, Verdict.UNVERIFIED),
        pytest.param(OTHER_ROUNDING.replace("= model", "= 2 * model"), Verdict.UNVERIFIED, marks=pytest.mark.slow),
        pytest.param(OTHER_ROUNDING.replace("kept[0] =", "_ ="), Verdict.NOT_EQUIVALENT, marks=pytest.mark.slow),
    ],
    ids=["another rounding", "twice as much", "nothing kept"],
)
def test_nobody_is_blamed_for_what_rounding_moves(after: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, after, BEFORE)
    assert result.verdict is verdict, (result.headline, result.notes)
    assert ("such a layer needs no bias" in result.headline) is (verdict is Verdict.UNVERIFIED)


@pytest.mark.slow
def test_weights_that_are_kept_are_compared(tmp_path: Path) -> None:
    before, after = (text.replace("model[0].bias", "model[2].weight") for text in (BEFORE, OTHER_ROUNDING))
    assert compared(tmp_path, after, before).verdict is Verdict.VERIFIED
    twice = compared(tmp_path, after.replace("= model", "= 1.01 * model"), before)
    assert twice.verdict is Verdict.NOT_EQUIVALENT, twice.headline
