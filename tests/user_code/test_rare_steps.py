"""Training steps that do at times what the first ones do not are judged there."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.equivalence import footprint
from optexp.result import Result, Verdict
from tests import two_files

BEFORE = """
import copy
import torch
from torch import nn

torch.manual_seed(0)
teacher, calls = nn.Linear(4, 2), [0]

def Model():
    return nn.Linear(4, 2)

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    global schedule
    optimizer = torch.optim.SGD(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 20 else 0.1)
    return optimizer

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    taught = nn.functional.mse_loss(model(batch[0]), teacher(batch[0]).detach())
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) + taught
    loss.backward()
    optimizer.step()
    schedule.step()
    calls[0] += 1
    if calls[0] % 10 == 0:
        teacher.load_state_dict(model.state_dict())
    return loss
"""


def compared(folder: Path, after: str, first: str = BEFORE) -> Result:
    return two_files.compared(folder, first, after, "measurement.verification_seeds=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "when"),
    [
        ("calls[0] % 10 == 0", "calls[0] % 10 == 1 and calls[0] > 1", "after 10 steps"),
        ("step < 20", "step < 25", "rates of later steps"),
        ("teacher.load_state_dict", "(lambda weights: None)", "after 10 steps"),
    ],
    ids=["a step late", "a schedule falls later", "the teacher never follows"],
)
def test_what_happens_at_times_is_judged(old: str, new: str, when: str, tmp_path: Path) -> None:
    assert old in BEFORE
    result = compared(tmp_path, BEFORE.replace(old, new))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert when in result.headline


@pytest.mark.slow
def test_a_step_that_changes_the_same_further_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "LIMIT_S", 1.0)  # 25 steps on a busy machine
    first = BEFORE.replace("calls[0] % 10 == 0", "calls[0] % 25 == 0")
    first = first.replace("teacher.load_state_dict(model.state_dict())", "model.bias.data.zero_()")
    result = compared(tmp_path, first.replace("model.bias.data.zero_()", "pass"), first)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "after 25 steps" in result.headline


AVERAGED = BEFORE.replace("calls = nn.Linear(4, 2), [0]", "calls, averaged = nn.Linear(4, 2), [0], None")
AVERAGED = AVERAGED.replace("teacher.load_state_dict(model.state_dict())", "averaged.update_parameters(model)")
AVERAGED = AVERAGED.replace(
    "    calls[0] += 1",
    """    global averaged
    averaged = averaged or torch.optim.swa_utils.AveragedModel(model)
    calls[0] += 1""",
)


@pytest.mark.slow
def test_yardsticks_of_a_first_step_hide_no_count_of_a_late_one(tmp_path: Path) -> None:
    assert "update_parameters" in AVERAGED
    result = compared(tmp_path, AVERAGED.replace("calls[0] % 10", "calls[0] % 15"), AVERAGED)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "after 10 steps: averaged fails G0" in result.headline


@pytest.mark.slow
def test_a_step_that_waits_hides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a core that other programs use: it takes long, and computes no longer."""
    monkeypatch.setattr(footprint, "LONGEST_S", 1.0)
    waiting = BEFORE.replace("    optimizer.zero_grad()", "    time.sleep(0.03)\n    optimizer.zero_grad()")
    waiting = waiting.replace("import copy", "import time")
    old, new = "calls[0] % 10 == 0", "calls[0] % 10 == 1 and calls[0] > 1"
    result = compared(tmp_path, waiting.replace(old, new), waiting)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


LOOKAHEAD = """
import torch
from torch import nn

class Lookahead(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state.update(count=torch.zeros(()), slow=p.clone())
                state["count"] += 1
                if state["count"] % 5 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])

Model = lambda: nn.Linear(4, 2)
get_inputs = lambda: [torch.randn(8, 4), torch.randint(2, (8,))]
get_optimizer = lambda params: Lookahead(params, lr=0.1)
loss = lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("% 5 == 0", "% 6 == 0", Verdict.NOT_EQUIVALENT),
        ("(p, 0.5)", "(p, 0.6)", Verdict.NOT_EQUIVALENT),
        ("lerp_(p, 0.5)", "mul_(0.5).add_(p, alpha=0.5)", Verdict.VERIFIED),
    ],
)
def test_an_optimizer_that_does_more_at_times_is_judged_then(
    old: str, new: str, verdict: Verdict, tmp_path: Path
) -> None:
    assert old in LOOKAHEAD
    result = compared(tmp_path, LOOKAHEAD.replace(old, new), LOOKAHEAD)
    assert result.verdict is verdict, result.headline


@pytest.mark.slow
def test_the_same_steps_in_other_words_are_verified(tmp_path: Path) -> None:
    result = compared(tmp_path, BEFORE.replace("calls[0] % 10 == 0", "not calls[0] % 10"))
    assert result.verdict is Verdict.VERIFIED, result.headline
