"""A target network that a step makes as a copy is another network than its source, though their values are equal at
first."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

BEFORE = """
import copy
import torch
from torch import nn

kept, calls = {}, 0

def Model():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))

def get_inputs():
    return [torch.randn(16, 6), torch.randint(4, (16,)), torch.randn(16), torch.randn(16, 6)]

def get_optimizer(params):
    return torch.optim.Adam(params, lr=1e-4)

def train_step(model, batch, optimizer):
    global calls
    if not kept:
        kept["target"] = copy.deepcopy(model)
    state, action, reward, after = batch
    with torch.no_grad():
        best = model(after).argmax(1, keepdim=True)
        goal = reward + 0.9 * kept["target"](after).gather(1, best).squeeze(1)
    loss = nn.functional.smooth_l1_loss(model(state).gather(1, action[:, None]).squeeze(1), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    calls += 1
    if calls % 4 == 0:
        kept["target"].load_state_dict(model.state_dict())
    return loss
"""
LISTED = (
    ("import copy\n", ""),
    ("copy.deepcopy(model)", "[p.detach().clone() for p in model.parameters()]"),
    ('kept["target"](after)', '(torch.relu(after @ kept["target"][0].T + kept["target"][1]) @ W.T + B)'),
    ("        best =", '        W, B = kept["target"][2:]\n        best ='),
    (
        'kept["target"].load_state_dict(model.state_dict())',
        'torch._foreach_copy_(kept["target"], [p.detach() for p in model.parameters()])',
    ),
)


def test_a_target_that_was_taken_for_its_source_is_refused(tmp_path: Path) -> None:
    """The best action seldom tells the two apart as long as their values are nearly equal."""
    result = compared(tmp_path, BEFORE.replace("best = model(after)", 'best = kept["target"](after)'), BEFORE)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "other values of the copies" in result.headline


@pytest.mark.parametrize("listed", [False, True], ids=["one operation", "a list of tensors"])
def test_the_same_target_in_another_form_is_verified(listed: bool, tmp_path: Path) -> None:
    second = BEFORE.replace("reward + 0.9 *", "reward.addcmul(torch.tensor(0.9),").replace(
        "squeeze(1)\n    loss", "squeeze(1))\n    loss"
    )
    if listed:
        second = BEFORE
        for old, new in LISTED:
            assert old in second
            second = second.replace(old, new)
    result = compared(tmp_path, second, BEFORE)
    assert result.verdict is Verdict.VERIFIED, result.headline
