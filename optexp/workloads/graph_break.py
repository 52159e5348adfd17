"""An MLP that looks at its own values half-way: Python must wait for them, which breaks every kind of graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optexp.workloads.mlp import Mlp


class Watched(nn.Module):
    """The check that one adds while hunting a NaN, and forgets."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not torch.isfinite(x).all():
            raise FloatingPointError("an activation is not finite")
        output: Tensor = self.second(x)
        return output


@dataclass
class GraphBreak(Mlp):
    """The MLP with a check of its activations between its halves."""

    def model(self) -> nn.Module:
        modules = self.chain()
        half = len(modules) // 2
        return Watched(nn.Sequential(*modules[:half]), nn.Sequential(*modules[half:]))
