"""Independent towers side by side: none needs another's result, yet on one stream each waits for the one before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optexp.program import Batch
from optexp.schema import choice
from optexp.workloads.learner import Learner
from optexp.workloads.operation import normal


class Towers(nn.Module):
    """Each on the same input; returns their outputs one by one, or their sum."""

    def __init__(self, towers: list[nn.Module], combine: str) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(tower(x) for tower in self.towers)
        return sum(outputs[1:], outputs[0]) if self.combine == "sum" else outputs


@dataclass
class Branches(Learner):
    """`towers` stacks of Linear(dim, dim) and GELU on (batch_size, dim); mean squared error when it trains."""

    mode: str = choice("forward", "forward_backward", "train")
    towers: int = 2
    dim: int = 512
    layers: int = 4
    combine: str = choice("sum", "none")

    def model(self) -> nn.Module:
        def tower() -> nn.Module:
            return nn.Sequential(*(m for _ in range(self.layers) for m in (nn.Linear(self.dim, self.dim), nn.GELU())))

        return Towers([tower() for _ in range(self.towers)], self.combine)

    def batch(self, generator: torch.Generator) -> Batch:
        return tuple(normal(generator, self.batch_size, self.dim) for _ in range(1 + self.targets))

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Of the sum, or of all outputs together."""
        assert isinstance(batch, tuple)
        outputs = (output,) if isinstance(output, Tensor) else output
        return torch.stack([nn.functional.mse_loss(o, batch[-1]) for o in outputs]).sum()
