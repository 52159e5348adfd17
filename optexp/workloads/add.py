"""The sum of two vectors: the first kernel of most courses, and pure memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.errors import Unsupported
from optexp.program import Program
from optexp.schema import choice
from optexp.workload import known
from optexp.workloads.operation import Operation, normal

MOST_THREADS = 1024  # of a block


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@dataclass
class Add(Operation):
    """Of `size` elements each; one sample is one element.

    variant:         torch; launched: a kernel of ours; unified: torch, with inputs in memory that host and GPU share
    blocks, threads: of the launched kernel: grid and block
    """

    sizes: ClassVar = {"cuda": {"size": 2**26}, "cpu": {"size": 2**20}}  # 256 MiB and 4 MiB of float32

    size: int | None = None
    variant: str = choice("torch", "launched", "unified")
    blocks: int = 1
    threads: int = 256

    def __post_init__(self) -> None:
        if self.blocks < 1 or not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(
                f"blocks={self.blocks} must be at least 1, and threads={self.threads} from 1 to {MOST_THREADS}"
            )
        if self.variant == "launched" and self.mode != "forward":
            raise ValueError("variant=launched has no backward pass: use mode=forward")

    @property
    def samples(self) -> int:
        return known(self.size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (known(self.size),)

    def model(self) -> nn.Module:
        if self.variant == "launched":
            # Imported only here: a repro.py of the plain sum carries no kernel.
            launched: type[nn.Module] = import_module("optexp.workloads.launched_sum").Launched
            return launched(self.blocks, self.threads)
        return Sum()

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        launched = self.variant == "launched"
        if launched and (reason := import_module("optexp.kernelkit.extension").why_not(device)):
            raise Unsupported(f"workload.variant=launched: {reason}")
        if self.variant == "unified" and device.type != "cuda":
            raise Unsupported("workload.variant=unified: on a CPU all memory is the host's: use device=cuda")
        if self.variant == "unified" and dtype is not torch.float32:
            raise Unsupported("workload.variant=unified: a cast leaves unified memory: use dtype=float32")
        return super().build(device, dtype, seed)

    def inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        pair = normal(generator, known(self.size)), normal(generator, known(self.size))
        if self.variant != "unified" or generator.device.type != "cuda":
            return pair
        return tuple(map(import_module("optexp.workloads.managed").managed, pair))
