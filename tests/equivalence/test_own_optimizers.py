"""Training steps with optimizers of their own, which the first call makes: they need no get_optimizer()."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
CASES = [(STEP, *other) for other in OTHERS.values()] + [(OBJECT, *other) for other in OTHERS_OF_OBJECT.values()]
NAMES = [*OTHERS, *(f"{name} in an object" for name in OTHERS_OF_OBJECT)]


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
    for strategy in (FusedOptimizer(), CompiledOptimizer()):
        assert "optimizers of its own" in str(strategy.unsupported(given, CPU))


def test_a_step_that_calls_what_it_is_given_has_the_default(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(STEP.replace(", sparse=True", "").replace("own.values()", "[optimizer]"))
    made = Module(path=str(tmp_path / "port.py"), mode="train")
    assert isinstance(made.build(CPU, torch.float32, 0).optimizer, torch.optim.AdamW)
    assert any("AdamW" in note for note in made.notes())
