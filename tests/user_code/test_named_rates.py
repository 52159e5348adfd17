"""An optimizer may call its learning rate by another name than `lr`."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_listed_state import PROGRAM
from tests.user_code.test_rare_steps import compared

NAMED = PROGRAM.format("""
class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"step_size": 0.05, "mass": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                velocity = state["velocity"] = group["mass"] * state.get("velocity", torch.zeros_like(p)) + p.grad
                p.sub_(group["step_size"] * velocity)

def get_optimizer(params):
    return Momentum(params)
""")
TORCHS = PROGRAM.format("""
def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
""")


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (NAMED, NAMED, Verdict.VERIFIED),
        (TORCHS, NAMED, Verdict.VERIFIED),
        (TORCHS, NAMED.replace("0.05", "0.0505"), Verdict.NOT_EQUIVALENT),
    ],
    ids=["identical", "beside torch's", "another rate"],
)
def test_a_rate_of_another_name(first: str, second: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, second, first)
    assert result.verdict is verdict, result.headline
