"""GELU as its formula: nine element-wise kernels, each through all of memory: the textbook case for fusion."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.schema import choice
from optexp.workload import known
from optexp.workloads.operation import Operation, normal


def formula(x: Tensor) -> Tensor:
    """The tanh approximation, operation by operation."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def functional(x: Tensor) -> Tensor:
    """The same from the library, in one kernel."""
    return F.gelu(x, approximate="tanh")


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {"formula": formula, "functional": functional}


class GeluOf(nn.Module):
    """One way to write GELU."""

    def __init__(self, gelu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(x)


class GeluOfSum(nn.Module):
    """GELU of a sum: fusion alone makes the addition free."""

    def __init__(self, gelu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gelu = gelu

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.gelu(a + b)


@dataclass
class Gelu(Operation):
    """On a size × size matrix, or on the sum of two; one sample is one element."""

    # float32 on a GPU: 1 GiB, far beyond any cache; on a CPU: 4 MiB
    sizes: ClassVar = {"cuda": {"size": 16384}, "cpu": {"size": 1024}}

    size: int | None = None
    variant: str = choice("formula", "functional")
    add: bool = False

    @property
    def samples(self) -> int:
        return known(self.size) ** 2

    @property
    def output_shape(self) -> tuple[int, ...]:
        return known(self.size), known(self.size)

    def model(self) -> nn.Module:
        return (GeluOfSum if self.add else GeluOf)(VARIANTS[self.variant])

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(normal(generator, *self.output_shape) for _ in range(1 + self.add))
