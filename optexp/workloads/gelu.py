"""GELU as its formula: nine element-wise kernels, each through all of memory: the textbook case for fusion."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from optexp.config import one_of
from optexp.program import Batch
from optexp.workload import Workload

SIZES = {"cuda": 16384, "cpu": 1024}  # 1 GiB of float32, far beyond any cache; 4 MiB


class GeluFormula(nn.Module):
    """The tanh approximation, operation by operation."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


@dataclass
class Gelu(Workload):
    """On a size × size matrix; a size left open depends on the device. One sample is one element."""

    mode: str = one_of("forward")
    size: int | None = None

    def resolve(self, device: str) -> Self:
        return self if self.size is not None else replace(self, size=SIZES[device])

    @property
    def samples(self) -> int:
        return self._side**2

    def model(self) -> nn.Module:
        return GeluFormula()

    def batch(self, generator: torch.Generator) -> Batch:
        return (torch.randn(self._side, self._side, generator=generator, device=generator.device),)

    @property
    def _side(self) -> int:
        return self.size if self.size is not None else SIZES["cpu"]
