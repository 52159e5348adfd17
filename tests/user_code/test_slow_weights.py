"""What an optimizer's rare steps change counts before they do: the same state may lie elsewhere in another program."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_listed_state import PROGRAM
from tests.user_code.test_rare_steps import compared

LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-1})
        self.count = 0
        params = self.param_groups[0]["params"]
        BEGIN

    @torch.no_grad()
    def step(self):
        self.count += 1
        params, rate = self.param_groups[0]["params"], self.param_groups[0]["lr"]
        for index, p in enumerate(params):
            p.sub_(p.grad, alpha=rate)
            if self.count % 5 == 0:
                slow = SLOW
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)

def get_optimizer(params):
    return Lookahead(params)
"""


def slow(begin: str, read: str) -> str:
    return PROGRAM.format(LOOKAHEAD.replace("BEGIN", begin).replace("SLOW", read))


BY_PARAMETER = slow("for p in params: self.state[p]['slow'] = p.detach().clone()", "self.state[p]['slow']")
LISTED = slow("self.slow = [p.detach().clone() for p in params]", "self.slow[index]")
GROUPED = slow("self.slow = [[p.detach().clone() for p in params]]", "self.slow[0][index]")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(BY_PARAMETER, LISTED, id="listed in the second"),
        pytest.param(LISTED, BY_PARAMETER, id="listed in the first", marks=SLOW),
        pytest.param(BY_PARAMETER, GROUPED, id="listed by group", marks=SLOW),
    ],
)
def test_slow_weights_may_lie_in_a_list(first: str, second: str, tmp_path: Path) -> None:
    result = compared(tmp_path, second, first)
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("slow.add_(p - slow, alpha=0.5)", "slow.add_(p - slow, alpha=0.51)", id="another share"),
        pytest.param("p.copy_(slow)", "p.copy_(slow); slow.sub_(p - slow).add_(0.01)", id="other weights", marks=SLOW),
        pytest.param("slow.add_(p - slow, alpha=0.5)", "slow = (slow + p) / 2", id="weights that stay", marks=SLOW),
    ],
)
def test_other_slow_weights_are_another_optimizer(right: str, wrong: str, tmp_path: Path) -> None:
    assert right in LISTED
    result = compared(tmp_path, LISTED.replace(right, wrong), BY_PARAMETER)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
