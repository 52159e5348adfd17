"""Parameters that a user's step changes beside its optimizer: other changes are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
    def forward(self, x): return self.head(torch.relu(self.body(x)))

def get_inputs(): return [torch.randn(32, 8), torch.randint(4, (32,))]
def get_optimizer(params): return torch.optim.SGD([*params][:2], lr=0.1)

def train_step(model, batch, optimizer):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    WAY
    return loss
"""
BY_HAND = "[p.data.sub_(p.grad, alpha=%s) for p in model.head.parameters()]"
NORMED = "model.body.weight.data.div_(model.body.weight.data.norm(dim=1, keepdim=True) * %s)"
DECAY = "[p.data.mul_(0.5).sub_(p.data, alpha=%s) for p in model.body.parameters()]"
SECOND = "torch.optim.SGD(model.head.parameters(), lr=%s).step()"
WAYS = {
    "a second optimizer": (SECOND % 0.05, SECOND % 0.052),
    "by hand": (BY_HAND % 0.1, BY_HAND % 0.11),
    "by hand, left out": (BY_HAND % 0.1, "None"),
    "a little decay beside much": (DECAY % 0.001, DECAY % 0.0),
    "a norm": (NORMED % 1.0, NORMED % 1.05),
}


IN_FORWARD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 4)
    def forward(self, ids): return self.head(self.rows(ids).mean(1))

def get_inputs(): return [torch.randint(20, (32, 6)), torch.randint(4, (32,))]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def loss(outputs, batch): return nn.functional.cross_entropy(outputs, batch[1])
"""

OWN_STEP = """
def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch)
    value.backward()
    optimizer.step()
    return value
"""


@pytest.mark.parametrize(("norm", "right"), [(1.0, True), (1.02, False)])
def test_changes_that_the_model_makes_in_its_forward_are_compared(
    check, norm: float, right: bool, tmp_path: Path
) -> None:
    path = tmp_path / "port.py"
    path.write_text(IN_FORWARD)

    def otherwise(program: Program) -> Program:
        program.model.rows.max_norm = norm
        forward = program.call
        return replace(program, forward=lambda ids: forward(ids) * 3 / 3)  # no bit need be the same

    found = check(Module(path=str(path), mode="train"), otherwise)
    assert found.ok is right, found.headline
    assert not found.undecided


@pytest.mark.parametrize("step", ["", OWN_STEP], ids=["ours", "the user's"])
@pytest.mark.parametrize(("share", "right"), [(1.0, True), (1.01, False), (0.0, False)])
def test_an_update_that_is_small_beside_what_the_forward_changes_is_compared(
    check, share: float, right: bool, step: str, tmp_path: Path
) -> None:
    path = tmp_path / "port.py"
    path.write_text(IN_FORWARD.replace("20", "400").replace("8", "64") + step)

    def otherwise(program: Program) -> Program:
        rows, forward = program.model.rows.weight.detach(), program.call
        before = rows.clone()

        def keep(*_: object) -> None:
            before.copy_(rows)

        program.optimizer.register_step_pre_hook(keep)
        program.optimizer.register_step_post_hook(lambda *_: rows.copy_(before + share * (rows - before)))
        return replace(program, forward=lambda ids: forward(ids) * 3 / 3)

    found = check(Module(path=str(path), mode="train"), otherwise)
    assert found.ok is right, found.headline
    assert not found.undecided


@pytest.mark.parametrize(("way", "wrong"), WAYS.values(), ids=WAYS)
def test_changes_beside_the_optimizer_are_compared(check, way: str, wrong: str, tmp_path: Path) -> None:
    path, other = tmp_path / "port.py", tmp_path / "other.py"
    path.write_text(STEP.replace("WAY", way))
    other.write_text(STEP.replace("WAY", wrong))

    def otherwise(program: Program) -> Program:
        function = import_file(other, "workload.path", anew=True).train_step
        assert isinstance(program.step, TrainStep)
        object.__setattr__(program.step, "function", function)
        return program

    def workload() -> Module:
        return Module(path=str(path), mode="train")

    found = check(workload(), seeds=1)
    assert found.ok, found.headline
    refused = check(workload(), otherwise, seeds=1)
    assert any(failure.tensor.startswith("change/") for failure in refused.failures), refused.headline
