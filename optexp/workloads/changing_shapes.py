"""An MLP on sequences of changing length: what was compiled or captured for one shape meets another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optexp.program import Batch
from optexp.workloads.mlp import Mlp
from optexp.workloads.operation import normal

LENGTHS = 3


@dataclass
class ChangingShapes(Mlp):
    """On (batch_size, length, in_features); one sample is one sequence.

    Every set of batches draws its own lengths from shortest to longest, which then take turns.
    """

    batch_size: int = 16
    shortest: int = 32
    longest: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest} must be at least 1 and at most longest={self.longest}")

    @property
    def variety(self) -> int:
        return LENGTHS

    def batch(self, generator: torch.Generator) -> Batch:
        return self.batches(generator, 1)[0]

    def batches(self, generator: torch.Generator, count: int) -> list[Batch]:
        bounds = self.shortest, self.longest + 1
        lengths = torch.randint(*bounds, (LENGTHS,), generator=generator, device=generator.device).tolist()
        features = (self.widths[0], self.widths[-1])[: 1 + self.targets]
        return [
            tuple(normal(generator, self.batch_size, lengths[index % LENGTHS], size) for size in features)
            for index in range(count)
        ]
