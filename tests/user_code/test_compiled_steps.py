"""Code that a user's step compiles is compiled in the steps that are timed, too, however often it was tried before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.module import Module

OPTIMIZERS = """
import torch
from torch import nn
from tests.user_code.test_compiled_steps import counted

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())

def get_inputs():
    return [torch.randn(8, 4)]

optimizers = []

def train_step(model, batch, optimizer=None):
    if not optimizers:
        for part in (model.first, model.second):
            made = torch.optim.SGD(part.parameters(), lr=0.01)
            made.step = torch.compile(made.step, backend=counted)
            optimizers.append(made)
    for each in optimizers:
        each.zero_grad()
    loss = model(batch[0]).square().mean()
    loss.backward()
    for each in optimizers:
        each.step()
    return loss
"""
RUNS: list[int] = []  # of compiled code, one entry for each


def counted(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    """A back end that counts calls of what it was given."""
    RUNS.append(0)
    number = len(RUNS) - 1

    def run(*inputs: Any) -> Any:
        RUNS[number] += 1
        return graph.forward(*inputs)

    return run


def test_optimizers_that_a_step_makes_and_compiles_run_compiled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    (tmp_path / "parts.py").write_text(OPTIMIZERS)
    arm = Arm()
    arm.setup(
        Spec(Module(path=str(tmp_path / "parts.py"), mode="train").resolve("cpu"), (), "cpu", "float32", 0).pack()
    )
    step = arm.runner()
    step()
    before, known = sum(RUNS), len(RUNS)
    for _ in range(12):
        step()
    assert sum(RUNS) - before == 12 * 2
    assert len(RUNS) == known, "and nothing is compiled again"
    assert "recompile_limit" not in capfd.readouterr().err
