"""Optimizers that count in their groups and attributes: put back before each step, and compared after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from optexp.program import Program, Snapshot
from tests.equivalence.conftest import Net, verified


class ScheduleFree(torch.optim.Optimizer):
    """Averages parameters by weights that it sums up in its groups; warms up by an attribute."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_sum": 0.0})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            rate = group["lr"] * min(1.0, self.updates / 10)
            group["weight_sum"] += rate**2
            share = rate**2 / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).sub_(p.grad, alpha=rate * (1 - share) / group["k"])
                z.sub_(p.grad, alpha=rate)


@dataclass
class Counting(Net):
    mode: str = "train"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters())


def test_what_an_optimizer_counts_is_put_back() -> None:
    program = Counting().build(torch.device("cpu"), torch.float32, 0)
    optimizer: Any = program.optimizer
    batch, snapshot = Counting().batch(torch.Generator()), Snapshot(program)
    for _ in range(3):
        program.step(program, batch)
    later = Snapshot(program)
    assert (optimizer.updates, optimizer.param_groups[0]["k"]) == (3, 3)
    snapshot.restore(program)
    assert (optimizer.updates, optimizer.param_groups[0]["weight_sum"]) == (0, 0.0)
    later.restore(program)
    assert (optimizer.updates, optimizer.param_groups[0]["k"]) == (3, 3)


def test_the_same_optimizer_is_verified() -> None:
    verification = verified(Counting(), seeds=1)
    assert verification.ok, verification.headline


@pytest.mark.parametrize(
    "by", [{"updates": 1}, *(pytest.param(by, marks=pytest.mark.slow) for by in ({"k": 1}, {"weight_sum": 1e-5}))]
)
def test_one_that_counts_otherwise_is_refused(by: dict[str, float]) -> None:
    def change(program: Program) -> Program:
        optimizer: Any = program.optimizer

        def step() -> None:
            ScheduleFree.step(optimizer)
            for key, more in by.items():
                holder = vars(optimizer) if key in vars(optimizer) else optimizer.param_groups[0]
                holder[key] += more

        optimizer.step = step
        return program

    verification = verified(Counting(), change, seeds=1)
    assert not verification.ok
    assert any(key in failure.tensor for failure in verification.failures for key in by), verification.headline
