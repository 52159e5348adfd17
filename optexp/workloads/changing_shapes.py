"""An MLP on sequences of changing length: what was compiled or captured for one shape meets another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optexp.program import Batch
from optexp.workloads.mlp import Mlp
from optexp.workloads.operation import normal


@dataclass
class ChangingShapes(Mlp):
    """On (batch_size, length, in_features), lengths from shortest to longest; one sample is one sequence."""

    batch_size: int = 16
    shortest: int = 32
    longest: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest} must be at least 1 and at most longest={self.longest}")

    def batch(self, generator: torch.Generator) -> Batch:
        length = torch.randint(self.shortest, self.longest + 1, (), generator=generator, device=generator.device)
        features = (self.widths[0], self.widths[-1])[: 1 + self.targets]
        return tuple(normal(generator, self.batch_size, int(length), size) for size in features)
