"""Softmax over rows: a reduction whose row must be read once or twice, depending on who wrote the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.workload import known
from optexp.workloads.operation import Operation, normal


class SoftmaxOfSum(nn.Module):
    """With an addition before it, that only fusion makes free."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(a + b, dim=-1)


@dataclass
class Softmax(Operation):
    """On a rows × columns matrix, or on the sum of two; one sample is one row."""

    sizes: ClassVar = {"cuda": {"rows": 16384, "columns": 1024}, "cpu": {"rows": 1024, "columns": 1024}}

    rows: int | None = None
    columns: int | None = None
    add: bool = False

    @property
    def samples(self) -> int:
        return known(self.rows)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return known(self.rows), known(self.columns)

    def model(self) -> nn.Module:
        return SoftmaxOfSum() if self.add else nn.Softmax(dim=-1)

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(normal(generator, *self.output_shape) for _ in range(1 + self.add))
