"""A model may hold its optimizer, as agents and meta-learners do: its state is put back and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

OUTSIDE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.adam = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)

def get_inputs():
    return [torch.randn(16, 4), torch.randint(3, (16,))]

def train_step(model, batch, optimizer):
    loss = model(*batch)
    model.adam.zero_grad()
    loss.backward()
    model.adam.step()
    return loss
"""
INSIDE = (
    OUTSIDE.partition("    def forward")[0]
    + """\
    def forward(self, x, y):
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return loss.detach()

def get_inputs():
    return [torch.randn(16, 4), torch.randint(3, (16,))]

def train_step(model, batch, optimizer):
    return model(*batch)
"""
)
PROGRAMS = [pytest.param(OUTSIDE, id="after forward"), pytest.param(INSIDE, id="in forward")]


@pytest.mark.parametrize("before", PROGRAMS)
@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("cross_entropy(self.net(x), y)", "nll_loss(self.net(x).log_softmax(-1), y)", Verdict.VERIFIED),
        pytest.param(".adam", ".updates", Verdict.VERIFIED, marks=pytest.mark.slow),
        ("lr=1e-2", "lr=1e-2, betas=(0.9, 0.99)", Verdict.NOT_EQUIVALENT),
    ],
    ids=["another form", "another name", "another average"],
)
def test_it_is_state_of_a_step(before: str, old: str, new: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, before.replace(old, new), before)
    assert result.verdict is verdict, result.headline


AGENT = """
import torch
from torch import nn

class Agent:
    def __init__(self):
        self.device = torch.device("cpu")
        self.net = nn.Linear(4, 3)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.opt = torch.optim.Adam([*self.net.parameters(), self.log_alpha], lr=1e-2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.agent = Agent()
        self.net = self.agent.net

def get_inputs():
    return [torch.randn(16, 4), torch.randint(3, (16,))]

def train_step(model, batch, optimizer):
    agent = model.agent
    loss = nn.functional.cross_entropy(agent.net(batch[0].to(agent.device)), batch[1])
    agent.opt.zero_grad()
    (loss - (agent.log_alpha * (loss.detach() - 1)).mean()).backward()
    agent.opt.step()
    return loss.detach()
"""


def test_an_object_of_a_class_of_both_files_is_one(tmp_path: Path) -> None:
    """A tensor that the object trains is its state, and its other attributes stay."""
    result = compared(tmp_path, AGENT, AGENT)
    assert result.verdict is Verdict.VERIFIED, result.headline
