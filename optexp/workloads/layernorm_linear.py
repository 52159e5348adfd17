"""LayerNorm and the linear layer after it: normalised rows go to memory and come back, unless the two are one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.workload import known
from optexp.workloads.operation import Operation, normal


@dataclass
class LayerNormLinear(Operation):
    """On (rows, features), to (rows, out); one sample is one row."""

    sizes: ClassVar = {
        "cuda": {"rows": 16384, "features": 1024, "out": 1024},
        "cpu": {"rows": 512, "features": 256, "out": 256},
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

    def model(self) -> nn.Module:
        norm = nn.LayerNorm(known(self.features))
        # As after training: with ones and zeros, a weight or a bias left out would not show.
        nn.init.normal_(norm.weight, mean=1.0, std=0.1)
        nn.init.normal_(norm.bias, std=0.1)
        return nn.Sequential(norm, nn.Linear(known(self.features), known(self.out)))

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (normal(generator, known(self.rows), known(self.features)),)
