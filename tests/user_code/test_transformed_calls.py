"""A step that calls its model inside torch.vmap has no arguments that a strategy could run the model with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.errors import Unsupported
from optexp.program import Program
from optexp.strategies.inplace import Inplace
from optexp.workloads.module import Module

FILE = """
import torch
from torch import nn

Model = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
get_inputs = lambda: [torch.randn(16, 8), torch.randint(4, (16,))]
get_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(CALL(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""


def built(folder: Path, call: str) -> Program:
    (folder / "net.py").write_text(FILE.replace("CALL", call))
    program = Module(path=str(folder / "net.py"), mode="train").build(torch.device("cpu"), torch.float32, 0)
    program.feed.reset([(torch.randn(16, 8), torch.randint(4, (16,)))])  # type: ignore[arg-type]
    return program


def test_the_model_is_not_run_by_itself(tmp_path: Path) -> None:
    program = built(tmp_path, "torch.vmap(model)")
    with pytest.raises(Unsupported, match="calls its model inside torch"):
        Inplace().apply(program)
    program.rehearse(program.feed.next())


def test_another_step_has_arguments(tmp_path: Path) -> None:
    _, notes = Inplace().apply(built(tmp_path, "model"))
    assert notes["rewritten"] == 1
