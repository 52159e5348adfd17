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


def test_one_that_counts_no_longer_is_refused_although_its_own_count_explains_its_updates() -> None:
    def change(program: Program) -> Program:
        optimizer: Any = program.optimizer

        def step() -> None:
            begun = optimizer.updates
            optimizer.count_after()
            optimizer.updates = begun

        optimizer.count_after, optimizer.step = optimizer.step, step
        return program

    verification = verified(Later(), change, seeds=1)
    assert not verification.ok
    assert any("updates" in failure.tensor for failure in verification.failures), verification.headline


class CountsLater(torch.optim.Optimizer):
    """Counts once it has updated."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.updates = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.updates**0.5)
        self.updates += 1


@dataclass
class Later(Net):
    mode: str = "train"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return CountsLater(model.parameters())


class Elsewhere(torch.optim.Optimizer):
    """Keeps a count under a name in its state, as MADGRAD does, averages in a list of its own, and what it looks up."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        held = [p for group in self.param_groups for p in group["params"]]
        self._means = [torch.zeros_like(p) for p in held]
        self.table: dict[str, Any] = {"rates": [None, None, None], "last": []}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
        place = int(state["k"]) % 3
        self.table["rates"][place] = self.param_groups[0]["lr"] / (1 + int(state["k"]))
        self.table["last"].append(int(state["k"]))
        for group in self.param_groups:
            for p, mean in zip(group["params"], self._means, strict=True):
                mean.mul_(0.9).add_(p.grad)
                p.sub_(mean, alpha=self.table["rates"][place])
        state["k"] += 1


@dataclass
class KeepsElsewhere(Net):
    mode: str = "train"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Elsewhere(model.parameters())


def test_what_an_optimizer_keeps_anywhere_is_put_back() -> None:
    program = KeepsElsewhere().build(torch.device("cpu"), torch.float32, 0)
    optimizer: Any = program.optimizer
    batch, snapshot = KeepsElsewhere().batch(torch.Generator()), Snapshot(program)
    for _ in range(2):
        program.step(program, batch)
    later, means = Snapshot(program), [mean.clone() for mean in optimizer._means]
    snapshot.restore(program)
    assert ("k" in optimizer.state, optimizer.table) == (False, {"rates": [None, None, None], "last": []})
    assert not any(mean.any() for mean in optimizer._means)
    later.restore(program)
    assert (int(optimizer.state["k"]), optimizer.table["rates"][:2]) == (2, [0.01, 0.005])
    assert optimizer.table["last"] == [0, 1]
    assert all(torch.equal(mean, kept) for mean, kept in zip(optimizer._means, means, strict=True))


def test_what_an_optimizer_keeps_anywhere_is_compared() -> None:
    assert verified(KeepsElsewhere(), seeds=1).ok

    def change(program: Program) -> Program:
        optimizer: Any = program.optimizer

        def step() -> None:
            Elsewhere.step(optimizer)
            optimizer._means[1].mul_(0.999)

        optimizer.step = step
        return program

    verification = verified(KeepsElsewhere(), change, seeds=1)
    assert not verification.ok
    assert any("_means/1" in failure.tensor for failure in verification.failures), verification.headline
