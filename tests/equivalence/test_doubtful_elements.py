"""Changes that are nothing but rounding, where a step updates parameters itself: wrong updates are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.equivalence.doubtful_elements import Doubtful
from optexp.equivalence.gates import TOLERANCES, Limits
from optexp.equivalence.quantities import Quantity, measured
from optexp.program import Program
from optexp.user_code.importing import import_file
from optexp.user_code.train_step import TrainStep
from optexp.workloads.module import Module

STEP = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
    def forward(self, x): return self.head(torch.relu(self.norm(self.body(x))))

def get_inputs(): return [torch.randn(32, 8), torch.randint(4, (32,))]
def get_optimizer(params): return torch.optim.SGD([*params][-2:], lr=0.1)

def train_step(model, batch, optimizer):
    model.zero_grad()
    x = batch[0]
    ORDER
    loss = nn.functional.cross_entropy(model(x), batch[1])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, p in [*model.named_parameters()][:-2]:
            UPDATE
    return loss
"""
SIGNS = "p.sub_(p.grad.sign(), alpha=0.001)"
DECAYED = "p.mul_(0.999).sub_(p.grad.sign(), alpha=0.001)"
WRONG = {
    "a rate": SIGNS.replace("0.001", "0.00103"),
    "a parameter left out": f"name == 'norm.bias' or {SIGNS}",
    "an update of another parameter": "p.sub_(p.grad.sign().flip(0), alpha=0.001)",
    "a decay left out": None,
    "a large step of a zero gradient": SIGNS + "\n            if name == 'body.bias': p.add_(0.02)",
}


def otherwise(path: Path):
    """Another function takes the step of the same program."""

    def change(program: Program) -> Program:
        assert isinstance(program.step, TrainStep)
        function = import_file(path, "workload.path", anew=True).train_step
        object.__setattr__(program.step, "function", function)
        return program

    return change


def written(path: Path, update: str, reordered: bool = False) -> Path:
    """The program with that update; `reordered` takes its sums in another order, which is as right."""
    swap = "order = torch.arange(31, -1, -1); x, batch = x[order], [None, batch[1][order]]" if reordered else "pass"
    path.write_text(STEP.replace("UPDATE", update).replace("ORDER", swap))
    return path


def test_signs_of_zero_gradients_may_differ(check, tmp_path: Path) -> None:
    path = written(tmp_path / "port.py", SIGNS)
    right = written(tmp_path / "reordered.py", SIGNS, reordered=True)
    found = check(Module(path=str(path), mode="train"), otherwise(right), seeds=2)
    assert found.ok, found.headline


CRITIC = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.other = nn.Linear(8, 24), nn.Linear(24, 1), nn.Linear(8, 1)
    def forward(self, x): return self.last(torch.relu(self.first(x)))

def get_inputs(): return [torch.randn(31, 8), torch.randn(31, 8)]
def get_optimizer(params): return torch.optim.SGD([*params][-2:], lr=0.1)

def train_step(model, batch, optimizer):
    model.zero_grad()
    real, fake = batch
    LOSS
    (loss + model.other(real).square().mean()).backward()
    optimizer.step()
    with torch.no_grad():
        for p in [*model.parameters()][:-2]: p.sub_(p.grad.sign(), alpha=0.001)
    return loss
"""
APART = "loss = model(real).mean() - model(fake).mean()"
IN_PIECES = """loss = 0
    for piece in real.split(1): loss = loss + model(piece).sum() / 31
    for piece in fake.split(1): loss = loss - model(piece).sum() / 31"""


def test_a_step_of_a_bias_that_cancels_is_rounding(check, tmp_path: Path) -> None:
    path, right = tmp_path / "critic.py", tmp_path / "pieces.py"
    path.write_text(CRITIC.replace("LOSS", APART))
    right.write_text(CRITIC.replace("LOSS", IN_PIECES))
    found = check(Module(path=str(path), mode="train"), otherwise(right), seeds=2)
    assert found.ok, found.headline


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_updates_are_refused(check, wrong: str | None, tmp_path: Path) -> None:
    path = written(tmp_path / "port.py", SIGNS if wrong else DECAYED)
    other = written(tmp_path / "other.py", wrong or SIGNS, reordered=True)
    found = check(Module(path=str(path), mode="train"), otherwise(other), seeds=1)
    assert any(failure.tensor.startswith("change/") for failure in found.failures), found.headline


def test_only_errors_that_rounding_explains_are_spared() -> None:
    reference = torch.tensor([1e-12, 0.5, 0.0], dtype=torch.float64)

    def change(*values: float) -> Quantity:
        value = torch.tensor(values, dtype=torch.float64)
        return next(measured([Quantity("change/p", value, reference, Limits(TOLERANCES["float32"]))]))

    doubtful = Doubtful.of(change(1e-3, 0.5001, 0.0))
    assert doubtful.elements.tolist() == [True, False, False]
    assert doubtful.spared(change(-2e-3, 0.5, 0.0), 1e-3).found.peak == 0
    assert doubtful.spared(change(-5e-3, 0.5, 0.0), 1e-3).value[0] == -5e-3, "larger than rounding"
    assert doubtful.spared(change(0.0, 0.6, 1e-3), 1e-3).value[1:].tolist() == [0.6, 1e-3], "no rounding at all"
    assert doubtful.spared(change(-5e-3, 0.5, 0.0), 0.5).found.peak == 0, "small beside other changes"
    assert doubtful.spared(change(-0.2, 0.5, 0.0), 0.5).value[0] == -0.2
