"""The sum of two vectors: the first kernel anybody writes, and nothing but memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.workload import known
from optexp.workloads.operation import Operation, normal


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@dataclass
class Add(Operation):
    """Of `size` elements each; one sample is one element."""

    sizes: ClassVar = {"cuda": {"size": 2**26}, "cpu": {"size": 2**20}}  # 256 MiB and 4 MiB of float32

    size: int | None = None

    @property
    def samples(self) -> int:
        return known(self.size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (known(self.size),)

    def model(self) -> nn.Module:
        return Sum()

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return normal(generator, known(self.size)), normal(generator, known(self.size))
