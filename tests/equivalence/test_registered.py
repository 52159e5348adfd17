"""A step that registers a buffer, beside one whose strategy had registered it before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from optexp.program import Batch, Outputs, Program
from optexp.strategy import Evidence, Notes, Stage, Strategy, contract
from optexp.verification.trial import Plan
from optexp.verification.verify import verify
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workloads.module import Module

REGISTERS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(8, 8), 0

    def forward(self, x):
        if self.rows < x.shape[0]:
            self.rows = x.shape[0]
            self.register_buffer("table", torch.arange(self.rows).to(x.dtype).add(1).log()[:, None], persistent=False)
        return self.linear(x) + self.table

def get_inputs():
    return [torch.randn(16, 8)]
"""


@dataclass
class Captured(Strategy):
    """What a graph does: the step's Python runs once, before the first step, and its operations in every step."""

    stage = Stage.CAPTURE
    factor: float = 1.0

    def apply(self, program: Program) -> tuple[Program, Notes]:
        program.step(program, program.feed.next())
        model = program.model
        table = model.get_buffer("table").mul_(self.factor)

        def step(_: Program, batch: Batch) -> Outputs:
            with torch.no_grad():
                return {"output": model.linear(batch[0]) + table}

        return replace(program, step=step), {}

    def evidence(self, *_: object) -> Evidence:
        return Evidence(True, "")


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.001, False)])
def test_a_buffer_that_a_capture_registers(factor: float, right: bool, tmp_path: Path) -> None:
    path = tmp_path / "registers.py"
    path.write_text(REGISTERS)
    stack = [Captured(factor)]
    bare = Spec(Module(path=str(path), mode="forward"), (), "cpu", "float32", seed=0, contract=contract(stack))
    reference, yardstick, candidate = InProcess(Reference(), "r"), InProcess(Arm(), "b"), InProcess(Arm(), "c")
    reference.call(Reference.setup, packed=bare.pack())
    yardstick.call(Arm.setup, packed=bare.pack())
    candidate.call(Arm.setup, packed=replace(bare, strategies=tuple(stack)).pack())
    found = verify(reference, yardstick, candidate, Plan([1], steps=3), contract(stack))
    assert found.ok is right, found.headline
