"""A workload from outside this repository."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optexp.program import Batch
from optexp.workload import Workload


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


@dataclass
class Doubling(Workload):
    size: int = 1000

    @property
    def samples(self) -> int:
        return self.size

    def model(self) -> nn.Module:
        return Doubled()

    def batch(self, generator: torch.Generator) -> Batch:
        return (torch.randn(self.size, generator=generator, device=generator.device),)
