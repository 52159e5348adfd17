"""An MLP that looks at its own values half-way: Python must wait for them, which breaks every kind of graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optexp.workloads.mlp import Mlp


class Watched(nn.Module):
    """The check that one adds while hunting a NaN, and forgets."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise FloatingPointError("an activation is not finite")
        return x


@dataclass
class GraphBreak(Mlp):
    """The MLP with a check of its activations between its halves."""

    def model(self) -> nn.Module:
        modules = list(super().model().children())
        half = len(modules) // 2
        return nn.Sequential(*modules[:half], Watched(), *modules[half:])
