"""Distances between all points of two sets: one call that turns out to be many operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.workload import known
from optexp.workloads.operation import Operation, normal


class Distances(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b)


@dataclass
class Cdist(Operation):
    """Euclidean, of two sets of `points` points in `dim` dimensions; one sample is one point of the first."""

    families: ClassVar = ("normal", "small")  # distances of large or nearly equal points cancel in any arithmetic
    sizes: ClassVar = {"cuda": {"points": 8192}, "cpu": {"points": 256}}

    points: int | None = None
    dim: int = 128

    @property
    def samples(self) -> int:
        return known(self.points)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return known(self.points), known(self.points)

    def model(self) -> nn.Module:
        return Distances()

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return normal(generator, known(self.points), self.dim), normal(generator, known(self.points), self.dim)
