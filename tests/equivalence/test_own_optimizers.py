"""Training steps with optimizers of their own, which the first call makes, or updates by hand: no get_optimizer()."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.fp64_variants import is_smooth
from optexp.program import NotCalled, Program
from optexp.strategies.compiled_optimizer import CompiledOptimizer
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.workloads.module import Module

CPU = torch.device("cpu")
STEP = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4)
    def forward(self, ids): return self.head(torch.relu(self.rows(ids).mean(1)))

def get_inputs(): return [torch.randint(50, (16, 8)), torch.randint(4, (16,))]

own = {}
def train_step(model, batch, optimizer):
    if not own:
        own["sparse"] = torch.optim.SparseAdam(model.rows.parameters(), lr=0.01)
        own["dense"] = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    for each in own.values(): each.zero_grad()
    loss.backward()
    for each in own.values(): each.step()
    return loss
"""
OTHERS = {
    "nothing": ("lr", "lr"),
    "a rate": ("lr=0.01)", "lr=0.0101)"),
    "no update": ("for each in own.values(): each.step()", "own['dense'].step()"),
    "gradients": ("loss.backward()", "(1.02 * loss).backward()"),
    "left gradients": ("for each in own.values(): each.zero_grad()", "own['sparse'].zero_grad()"),
}

OBJECT = (
    STEP[: STEP.index("own = {}")]
    + """
class Trainer:
    def __init__(self, model):
        self.sparse = torch.optim.SparseAdam(model.rows.parameters(), lr=0.01)
        self.dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
        self.average, self.steps = model.head.weight.detach().clone(), 0

    def step(self, model):
        self.sparse.step()
        self.dense.step()
        self.average.lerp_(model.head.weight.detach(), 0.1)
        self.steps += 1

trainer = None
def train_step(model, batch, optimizer):
    global trainer
    trainer = trainer or Trainer(model)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    trainer.step(model)
    return loss
"""
)
OTHERS_OF_OBJECT = {
    "nothing": ("lr", "lr"),
    "a rate": ("lr=0.1)", "lr=0.1001)"),
    "an average": ("0.1)\n        self.steps", "0.11)\n        self.steps"),
    "a count": ("self.steps += 1", "self.steps += 2"),
}
BY_HAND = (
    STEP[: STEP.index("own = {}")].replace(", sparse=True", "")
    + """
def train_step(model, batch, optimizer):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
            p.grad.zero_()
    return loss
"""
)
OTHERS_BY_HAND = {
    "nothing": ("0.5", "0.5"),
    "a rate": ("0.5 *", "0.5005 *"),
    "a frozen layer": ("p in model.parameters():", "p in model.rows.parameters():"),
}
OF_PARAMETERS = BY_HAND.replace(
    "p -= 0.5 * p.grad",
    "p.kept = 0.9 * getattr(p, 'kept', torch.zeros_like(p)) + p.grad; p.data -= p.rate * p.kept",
).replace(
    "    def forward", "        for p in self.parameters(): p.rate, p.group = 0.1, {'decay'}  # stay\n    def forward"
)
OTHERS_OF_PARAMETERS = {"nothing": ("0.9", "0.9"), "momentum": ("0.9 *", "0.8 *")}
ADVERSARIES = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x): return self.critic(self.generator(x))

def get_inputs(): return [torch.randn(16, 4), torch.randn(16, 8)]

own = {}
def train_step(model, batch, optimizer):
    for part in () if own else ("critic", "generator"):
        own[part] = torch.optim.SGD(getattr(model, part).parameters(), lr=0.1)
    own["critic"].zero_grad()  # which the loss of the generator in the step before has left
    (model(batch[0]).mean() - model.critic(batch[1]).mean()).backward()
    own["critic"].step()
    own["critic"].zero_grad()
    own["generator"].zero_grad()
    loss = -model(batch[0]).mean()
    loss.backward()
    own["generator"].step()
    return loss
"""
OTHERS_OF_ADVERSARIES = {
    "nothing": ("lr", "lr"),
    "left gradients": ('own["critic"].zero_grad()  #', "#"),
}
CASES = [(STEP, *other) for other in OTHERS.values()] + [(OBJECT, *other) for other in OTHERS_OF_OBJECT.values()]
CASES += [(BY_HAND, *other) for other in OTHERS_BY_HAND.values()]
CASES += [(OF_PARAMETERS, *other) for other in OTHERS_OF_PARAMETERS.values()]
CASES += [(ADVERSARIES, *other) for other in OTHERS_OF_ADVERSARIES.values()]
NAMES = [
    *OTHERS,
    *(f"{name} in an object" for name in OTHERS_OF_OBJECT),
    *(f"{name} by hand" for name in OTHERS_BY_HAND),
]
NAMES += [f"{name} in parameters" for name in OTHERS_OF_PARAMETERS]
NAMES += [f"{name} of adversaries" for name in OTHERS_OF_ADVERSARIES]


class Apart(Module):
    """Every arm has globals of its own, as in a process of its own."""

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        return Module(path=self.path, mode=self.mode).build(device, dtype, seed)


def workload(folder: Path, text: str = STEP) -> Module:
    (folder / "port.py").write_text(text)
    return Apart(path=str(folder / "port.py"), mode="train")


@pytest.mark.parametrize(("text", "right", "wrong"), CASES, ids=NAMES)
def test_another_step_is_verified_if_nothing_differs(check, text: str, right: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    assert right in text
    path.write_text(text.replace(right, wrong))

    def otherwise(program: Program) -> Program:
        made = Module(path=str(path), mode="train").build(CPU, torch.float32, 0)
        made.put(program.state())
        return replace(made, feed=program.feed, optimizer=program.optimizer)

    verified = check(workload(tmp_path, text), otherwise)
    assert verified.ok is (right == wrong), verified.headline


def test_no_strategy_can_change_an_optimizer_that_no_step_calls(tmp_path: Path) -> None:
    given = workload(tmp_path).build(CPU, torch.float32, 0)
    assert isinstance(given.optimizer, NotCalled)
    assert not given.optimizer.by_hand
    for strategy in (FusedOptimizer(), CompiledOptimizer()):
        assert "optimizers of its own" in str(strategy.unsupported(given, CPU))


def test_a_step_that_calls_what_it_is_given_has_the_default(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(STEP.replace(", sparse=True", "").replace("own.values()", "[optimizer]"))
    made = Module(path=str(tmp_path / "port.py"), mode="train")
    assert isinstance(made.build(CPU, torch.float32, 0).optimizer, torch.optim.AdamW)
    assert any("AdamW" in note for note in made.notes())


SIGNS = BY_HAND.replace("p -= 0.5 * p.grad", "p -= 0.01 * p.grad / (p.grad.abs() + 1e-12)").replace("_norm_", "_value_")


@pytest.mark.parametrize(("text", "smooth"), [(BY_HAND, True), (SIGNS, False), (STEP, False)])
def test_updates_by_hand_that_jump_are_known(text: str, smooth: bool, tmp_path: Path) -> None:
    fp64 = Fp64Reference(workload(tmp_path, text), CPU, torch.float32, 0)
    fp64.draw(1, 1, "normal")
    fp64.step(0, fp64.initial)
    assert is_smooth(fp64, 0, fp64.initial) is smooth


CARRIED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.hidden = nn.GRUCell(6, 8), nn.Linear(8, 3), None
    def forward(self, x):
        self.hidden = self.cell(x, self.hidden if self.hidden is None else self.hidden.detach())
        return self.head(self.hidden), self.hidden

def get_inputs(): return [torch.randn(4, 6)]
"""
OF_A_STEP = """
hidden = None
def train_step(model, batch, optimizer):
    global hidden
    model.hidden = hidden
    out, hidden = model(batch[0])
    model.hidden = None
    optimizer.zero_grad()
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "hidden": hidden}
"""


@pytest.mark.parametrize(("text", "mode"), [(CARRIED, "forward"), (CARRIED + OF_A_STEP, "train")])
def test_a_state_that_a_step_returns_is_there_for_the_next(check, text: str, mode: str, tmp_path: Path) -> None:
    made = workload(tmp_path, text)
    made.mode = mode
    assert check(made, lambda program: program).ok
