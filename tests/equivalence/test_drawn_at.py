"""The line and the module that draw random numbers beside dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence.drawn_at import drawn_at
from optexp.result import Verdict
from tests.user_code.test_own_model import run, written

TEXT = """
def drop_path(x):
    return x * torch.rand(len(x), 1).round()

class Block(nn.Module):
    def forward(self, x):
        return drop_path(x) if self.training else x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def get_inputs():
    return [torch.randn(8, 4)]
"""


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_line_and_module_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Noise()))
    found = drawn_at(model, lambda: model(torch.ones(3, 2)))
    assert found.startswith("test_drawn_at.py:")
    assert found.endswith(": return x + torch.randn_like(x), in 1.0 (Noise)")


@pytest.mark.parametrize("last", [nn.Identity(), nn.Bilinear(2, 2, 2)], ids=["draws nothing", "does not run"])
def test_no_place_is_named_without_a_draw(last: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), last)
    assert drawn_at(model, lambda: model(torch.ones(3, 2))) == ""


def test_a_model_that_draws_is_told_where(tmp_path: Path) -> None:
    settings = ["workload.mode=train", "strategy=fused_optimizer", "verify=only", "isolation=none"]
    result = run(tmp_path, written(tmp_path, TEXT), *settings)
    assert result.verdict is Verdict.UNVERIFIED
    assert "(mine.py:6: return x * torch.rand(len(x), 1).round(), in blocks.1 (Block))" in result.headline
    assert "define train_step(model, batch, optimizer)" in result.headline
