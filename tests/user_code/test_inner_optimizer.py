"""An optimizer around another one that moves parameters, takes gradients there, and moves them back (SAM)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.errors import NoReference
from optexp.result import Verdict
from optexp.workloads.module import Module
from optexp.workloads.script import Script
from tests.user_code.test_rare_steps import compared

SAM = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
    @torch.no_grad()
    def first_step(self):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (torch.stack(grads).norm() + 1e-12))
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p in self.state):
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()
    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "a closure is required"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()
"""
PORT = (
    SAM
    + """
def Model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

def get_inputs():
    return [torch.randn(8, 4), torch.randint(3, (8,))]

def get_optimizer(params):
    return SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9)

def train_step(model, batch, optimizer):
    x, y = batch
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.first_step()
    cross_entropy(model(x), y).backward()
    optimizer.second_step()
    return loss
"""
)
SCRIPT = (
    SAM
    + """
import optexp
model = nn.Linear(4, 3)
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
data = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))]
for x, y in optexp.steps(data, model=model, optimizer=optimizer):
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step(lambda: cross_entropy(model(x), y).backward())
"""
)
FIRST = "    optimizer.first_step()\n    cross_entropy(model(x), y).backward()\n"
CLOSURE = """    optimizer.step(lambda: cross_entropy(model(x), y).backward())
    return loss
"""
BY_HAND = """
def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def train_step(model, batch, optimizer):
    x, y = batch
    loss = cross_entropy(model(x), y)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    moves = [gradient * (0.05 / norm) for gradient in gradients]
    torch._foreach_add_([p.data for p in model.parameters()], moves)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    torch._foreach_sub_([p.data for p in model.parameters()], moves)
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(PORT[: PORT.index("    optimizer.first_step()\n")] + CLOSURE, id="by a closure", marks=SLOW),
        pytest.param(PORT[: PORT.index("def get_optimizer")] + BY_HAND, id="by hand"),
    ],
)
def test_an_optimizer_around_another_is_verified(second: str, tmp_path: Path) -> None:
    result = compared(tmp_path, second, PORT)
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rho=0.05", "rho=0.1"),
        pytest.param('p.data = self.state[p]["old_p"]', "pass", id="not restored", marks=SLOW),
        pytest.param(FIRST, "", id="one gradient", marks=SLOW),
        pytest.param("lr=0.1", "lr=0.101", marks=SLOW),
        pytest.param("momentum=0.9", "momentum=0.91", marks=SLOW),
    ],
)
def test_one_that_computes_otherwise_is_another(old: str, new: str, tmp_path: Path) -> None:
    assert old in PORT
    result = compared(tmp_path, PORT.replace(old, new), PORT)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


def test_the_inner_optimizer_is_that_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(PORT)
    workload = Module(path=str(tmp_path / "port.py"))
    workload.mode = "train"
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    assert type(program.optimizer) is torch.optim.SGD
    assert all(parameter.any() for parameter in program.model.parameters())  # a trial step has left none of its zeros


def test_a_scripts_optimizer_may_be_around_another(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    workload = Script(path=str(tmp_path / "train.py"))
    workload.mode = "train"
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    before = {name: tensor.clone() for name, tensor in program.state().items()}
    program.step(program, workload.batch(torch.Generator().manual_seed(0)))
    after = program.state()
    assert type(program.optimizer) is torch.optim.SGD
    assert {name for name, tensor in before.items() if not torch.equal(tensor, after[name])} == before.keys()


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param('self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad; p.sub_(self.state[p]["sum"])'),
        pytest.param('self.calls = getattr(self, "calls", 0) + 1', marks=SLOW),
        pytest.param('assert self.state[p].get("norm", 0) >= 0; self.state[p]["norm"] = float(p.grad.norm())'),
    ],
    ids=["a sum of gradients", "a count", "a number that is checked"],
)
def test_values_that_the_outer_one_keeps_for_later_steps_are_named(kept: str, tmp_path: Path) -> None:
    line = '                self.state[p]["old_p"] = p.data.clone()\n'
    (tmp_path / "port.py").write_text(PORT.replace(line, f"{line}                {kept}\n"))
    workload = Module(path=str(tmp_path / "port.py"))
    workload.mode = "train"
    with pytest.raises(NoReference, match="reads values that an earlier one left in it, beside those of its base_"):
        workload.build(torch.device("cpu"), torch.float32, 0)
