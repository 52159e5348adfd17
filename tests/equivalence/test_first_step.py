"""The first step after building is held against repetitions of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from optexp.equivalence.missed import End
from optexp.program import Batch, Outputs, Program, preserved
from optexp.strategy import Evidence, Notes, Stage, Strategy
from optexp.verification import first_step
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.spec import Spec
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp


@dataclass
class WarmsUp(Strategy):
    """Runs the model three times before its first step, which nothing in the model tells of."""

    stage = Stage.REWRITE

    kept: bool = False
    calls: Any = field(default_factory=count)

    def apply(self, program: Program) -> tuple[Program, Notes]:
        plain = program.step
        program.model.append(nn.BatchNorm1d(10))

        def step(program: Program, batch: Batch) -> Outputs:
            if not next(self.calls):
                with torch.no_grad(), preserved(program) if self.kept else torch.enable_grad():
                    for _ in range(3):
                        program.predict(batch)
            return plain(program, batch)

        return replace(program, step=step), {}

    def evidence(self, *_: object) -> Evidence:
        return Evidence(True, "")


class Settles(nn.Module):
    """Its own first call differs, and nobody can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.source = iter([3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.fill_(next(self.source, 1.0))
        return x * self.scale


class Halves(nn.Module):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5).relu()


@dataclass
class LooksFirst(Strategy):
    """Runs the program once while it is applied, as one does that looks at the shapes of results."""

    stage = Stage.REWRITE

    def apply(self, program: Program) -> tuple[Program, Notes]:
        program.step(program, program.feed.next())
        return program, {}

    def evidence(self, *_: object) -> Evidence:
        return Evidence(True, "")


def arm(workload: Any, *strategies: Strategy) -> InProcess[Arm]:
    """Its messages are asked as of a process."""
    made = Arm()
    made.setup(Spec(workload, strategies, "cpu", "float32", 0, folders=("/dev/shm",)).pack())
    return InProcess(made, "arm")


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_honest_programs_pass(mode):
    workload = LeNet5(mode=mode, batch_size=8)
    messages, unlike = first_step.check_first_step(arm(workload), arm(workload))
    assert (messages, unlike) == ([], [])


@pytest.mark.parametrize("kept", [False, True])
def test_what_only_the_first_step_does_is_seen(kept):
    workload = LeNet5(mode="train", batch_size=8)
    messages, unlike = first_step.check_first_step(arm(workload), arm(workload, WarmsUp(kept)))
    assert not unlike
    names = {f"buffer/12.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")}
    assert {message.tensor for message in messages} == (set() if kept else names)
    assert all(message.gate == first_step.GATE for message in messages)


def test_what_the_baseline_does_likewise_is_told_and_no_fault(monkeypatch):
    monkeypatch.setattr(Mlp, "model", lambda self: Settles())
    workload = Mlp(mode="forward", batch_size=4, dim=8)
    messages, unlike = first_step.check_first_step(arm(workload), arm(workload))
    assert not messages
    assert "buffer/scale" in unlike


def test_steps_that_write_to_their_inputs_begin_with_the_same_values_again(monkeypatch):
    monkeypatch.setattr(Mlp, "model", lambda self: Halves())
    workload = Mlp(mode="forward", batch_size=4, dim=8)
    plain, looked = arm(workload), arm(workload, LooksFirst())
    assert plain.target.first_step() == looked.target.first_step() == looked.target.repeated(End(1))
    assert first_step.check_first_step(plain, looked) == ([], [])
