"""Base of workloads of a single operation: they are differentiated without a loss, by their inputs too."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from optexp.equivalence.input_families import FAMILIES, NONCONTIGUOUS
from optexp.program import Batch, Program, Step, pullback
from optexp.schema import choice
from optexp.workload import Workload

ODD = (1031, 131, 77)  # sizes that no tile divides


@dataclass
class Operation(Workload):
    """Forward, or forward and backward from a gradient that arrives at the output (see `optexp.program.pullback`)."""

    operation: ClassVar = True
    families: ClassVar = ("normal", *FAMILIES, NONCONTIGUOUS)

    mode: str = choice("forward", "forward_backward")

    @property
    @abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """Of the gradient that arrives."""

    @abstractmethod
    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs of the operation, on the generator's device."""

    def tails(self) -> list[Self]:
        odd: dict[str, Any] = dict(zip(self.sizes["cpu"], ODD, strict=False))
        return [replace(self, **odd)]

    @property
    def targets(self) -> int:
        return 0 if self.mode == "forward" else 1

    def batch(self, generator: torch.Generator) -> Batch:
        inputs = self.inputs(generator)
        return inputs if self.mode == "forward" else (*inputs, normal(generator, *self.output_shape))

    def products(self, *sizes: int) -> float:
        """Of one matrix product; its backward pass has two more, as large."""
        return 2.0 * prod(sizes) * (1 if self.mode == "forward" else 3)

    def step(self) -> Step:
        return super().step() if self.mode == "forward" else pullback

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        return replace(super().build(device, dtype, seed), loss=None, pullback=self.mode == "forward_backward")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal float32 on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator.device)
