"""A short chain of element-wise operations: as many passes over memory as there are operations, where one would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.schema import choice
from optexp.workload import known
from optexp.workloads.operation import Operation, normal


class ReluBias(nn.Module):
    """ReLU, then a bias for each column."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(columns))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + self.bias


class ReluBiasScale(ReluBias):
    """... times a number."""

    def __init__(self, columns: int, scale: float) -> None:
        super().__init__(columns)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ReluBiasDropout(ReluBias):
    """... then dropout, which draws its mask in inference too: without it there would be nothing to measure."""

    def __init__(self, columns: int, p: float) -> None:
        super().__init__(columns)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.p, training=True)


@dataclass
class Elementwise(Operation):
    """On a rows × columns matrix; one sample is one element."""

    sizes: ClassVar = {"cuda": {"rows": 16384, "columns": 8192}, "cpu": {"rows": 1024, "columns": 1024}}

    variant: str = choice("relu_bias_scale", "relu_bias_dropout")
    rows: int | None = None
    columns: int | None = None
    scale: float = 1.5
    p: float = 0.1

    @property
    def samples(self) -> int:
        return known(self.rows) * known(self.columns)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return known(self.rows), known(self.columns)

    def model(self) -> nn.Module:
        if self.variant == "relu_bias_scale":
            return ReluBiasScale(known(self.columns), self.scale)
        return ReluBiasDropout(known(self.columns), self.p)

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (normal(generator, *self.output_shape),)
