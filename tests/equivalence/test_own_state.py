"""An optimizer of a workload's own may make its state in float32 by itself; in the reference it is float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.program import Program
from tests.equivalence.conftest import Net, verified


class Averaged(torch.optim.Optimizer):
    """Momentum, in one tensor of all parameters that it makes at once."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.held = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, average in self.averages():
            average.lerp_(p.grad, 0.1)
            p.sub_(average, alpha=self.param_groups[0]["lr"])

    def averages(self) -> list[tuple[nn.Parameter, Tensor]]:
        parameters = self.param_groups[0]["params"]
        parts = self.held.split([p.numel() for p in parameters])
        return [(p, part.view_as(p)) for p, part in zip(parameters, parts, strict=True)]


class MadeLater(Averaged):
    """The same, with an average of each parameter that its first step makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        del self.held

    def averages(self) -> list[tuple[nn.Parameter, Tensor]]:
        (group,) = self.param_groups
        return [
            (p, self.state[p].setdefault("average", torch.zeros(p.shape, dtype=torch.float32))) for p in group["params"]
        ]


class Quicker(Averaged):
    """Wrong: averages over fewer steps."""

    def averages(self) -> list[tuple[nn.Parameter, Tensor]]:
        self.held.mul_(0.99)
        return super().averages()


@dataclass
class Averaging(Net):
    mode: str = "train"
    kind: type[Averaged] = Averaged

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind(model.parameters())


def quicker(program: Program) -> Program:
    assert program.optimizer is not None
    program.optimizer.__class__ = Quicker
    return program


@pytest.mark.parametrize("kind", [Averaged, MadeLater])
def test_state_that_an_optimizer_makes_in_float32_is_float64_in_the_reference(kind: type[Averaged]) -> None:
    verification = verified(Averaging(kind=kind), seeds=1)
    assert verification.ok, verification.headline


def test_another_momentum_is_another_update() -> None:
    assert not verified(Averaging(), quicker, seeds=1).ok
