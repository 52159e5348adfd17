"""A count that the second program's optimizer keeps in the state of its parameters, and the first one's in itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.two_files import compared

COUNTING = """
import torch
from torch import nn

class Corrected(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=0.01))
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(mean / (1 - 0.9**self.t), alpha=self.param_groups[0]["lr"])

def Model():
    return nn.Linear(6, 4)

def get_inputs():
    return [torch.randn(8, 6), torch.randn(8, 4)]

def get_optimizer(parameters):
    return Corrected(parameters)

def loss(outputs, batch):
    return nn.functional.mse_loss(outputs, batch[1])
"""
MOVED = COUNTING.replace("        self.t += 1\n", "").replace("self.t)", 'state["step"])')
COUNTED = MOVED.replace("mean =", 'state["step"] = state.get("step", 0) + 1\n            mean =', 1)
FROZEN = MOVED.replace("mean =", 'state["step"] = 1\n            mean =', 1)
LATER = COUNTED.replace(' - 0.9**state["step"]', ' - 0.9**state["step"] + (self.t > 1000)')
BOTH = LATER.replace("    def step(self):\n", "    def step(self):\n        self.t += 1\n")


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (COUNTING, COUNTED, Verdict.VERIFIED),
        (COUNTING, FROZEN, Verdict.NOT_EQUIVALENT),
        (BOTH, LATER, Verdict.NOT_EQUIVALENT),
    ],
    ids=["counts", "is frozen", "is another count, which both keep"],
)
def test_a_count_may_move_to_the_state_of_parameters(tmp_path: Path, first: str, second: str, verdict: Verdict) -> None:
    result = compared(tmp_path, first, second)
    assert result.verdict is verdict, result.headline
