"""A linear layer and the GELU after it: an activation that a product could apply before it writes its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.workload import known
from optexp.workloads.operation import Operation, normal


@dataclass
class LinearGelu(Operation):
    """On (rows, features), to (rows, out); one sample is one row."""

    sizes: ClassVar = {
        "cuda": {"rows": 4096, "features": 1024, "out": 4096},
        "cpu": {"rows": 256, "features": 256, "out": 1024},
    }

    rows: int | None = None
    features: int | None = None
    out: int | None = None

    @property
    def samples(self) -> int:
        return known(self.rows)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return known(self.rows), known(self.out)

    @property
    def flops(self) -> float:
        return self.products(known(self.rows), known(self.features), known(self.out))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(known(self.features), known(self.out)), nn.GELU(approximate="tanh"))

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (normal(generator, known(self.rows), known(self.features)),)
