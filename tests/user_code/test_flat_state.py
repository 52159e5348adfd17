"""An optimizer may keep its state in one row with all parameters, as fused updates by hand take it."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_listed_state import LISTS, PROGRAM, TORCHS
from tests.user_code.test_rare_steps import compared

ROWS = PROGRAM.format("""
class Flat(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})
        self.sizes = [p.numel() for p in self.param_groups[0]["params"]]
        self.t, self.m, self.v = 0, torch.zeros(sum(self.sizes)), torch.zeros(sum(self.sizes))

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        params, (one, two) = group["params"], group["betas"]
        grads = torch.cat([p.grad.flatten() for p in params])
        self.t += 1
        self.m.lerp_(grads, 1 - one)
        self.v.mul_(two).addcmul_(grads, grads, value=1 - two)
        below = (self.v / (1 - two**self.t)).sqrt() + group["eps"]
        change = self.m / below * (group["lr"] / (1 - one**self.t))
        for p, part in zip(params, change.split(self.sizes)):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(part.view_as(p))

def get_optimizer(params):
    return Flat(params)
""")


def partly_frozen(program: str) -> str:
    """The same with a layer that does not learn."""
    begins = program.replace("return nn.Sequential(nn.Linear(4, 8)", "return nn.Sequential(still(), nn.Linear(4, 8)")
    begins = begins.replace("def Model", "def still():\n    return nn.Linear(4, 4).requires_grad_(False)\n\ndef Model")
    own, given = "super().__init__(params, ", "AdamW(params, "
    return begins.replace(own, own.replace("params", LEARNING)).replace(given, given.replace("params", LEARNING))


LEARNING = "[p for p in params if p.requires_grad]"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(TORCHS, ROWS, id="in the second"),
        pytest.param(ROWS, TORCHS, id="in the first", marks=SLOW),
        pytest.param(LISTS, ROWS, id="beside lists", marks=SLOW),
        pytest.param(partly_frozen(TORCHS), partly_frozen(ROWS), id="of the parameters that learn"),
        pytest.param(partly_frozen(TORCHS), partly_frozen(LISTS), id="lists of those", marks=SLOW),
    ],
)
def test_a_row_holds_the_state_of_the_parameters(first: str, second: str, tmp_path: Path) -> None:
    result = compared(tmp_path, second, first)
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("value=1 - two", "value=1.1 - 1.1 * two", id="squares"),
        pytest.param("self.m.lerp_(grads", "self.m[:-2].lerp_(grads[:-2]", id="tail", marks=SLOW),
    ],
)
def test_another_update_of_a_row_is_another_optimizer(right: str, wrong: str, tmp_path: Path) -> None:
    assert right in ROWS
    result = compared(tmp_path, ROWS.replace(right, wrong), TORCHS)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


@SLOW
def test_another_average_beside_a_row_is_another_optimizer(tmp_path: Path) -> None:
    result = compared(tmp_path, TORCHS.replace("lr=1e-2", "lr=1e-2, betas=(0.9, 0.998)"), ROWS)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
