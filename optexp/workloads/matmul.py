"""A matrix product: compute-bound when large, and served by another kernel of the library at almost every size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.workload import known
from optexp.workloads.operation import Operation, normal


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


@dataclass
class Matmul(Operation):
    """Of two size × size matrices; one sample is one row of the result."""

    sizes: ClassVar = {"cuda": {"size": 4096}, "cpu": {"size": 256}}

    size: int | None = None

    @property
    def samples(self) -> int:
        return known(self.size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return known(self.size), known(self.size)

    @property
    def flops(self) -> float:
        return self.products(known(self.size), known(self.size), known(self.size))

    def model(self) -> nn.Module:
        return Product()

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return normal(generator, *self.output_shape), normal(generator, *self.output_shape)
